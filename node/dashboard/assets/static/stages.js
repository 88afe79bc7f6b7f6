"use strict";
// The stages of a pipeline: a bar of the rate, and the figures. The server writes the same.

function describeStage(stage) {
  if (!stage.peers) return "nobody serves it";
  return `${stage.peers} peer${stage.peers === 1 ? "" : "s"} · ${digits(stage.rate, 1)} microbatches/s · round ${digits(stage.round, 0)}`;
}
function stageRow(stage) {
  const row = make("div", stage.peers ? "lane" : "lane late"), bar = draw("svg", { "aria-hidden": "true" });
  bar.append(draw("rect", { class: "compute", x: "0%", width: `${100 * stage.share}%`, height: "100%" }));
  row.append(make("span", "id", `stage ${stage.stage}`), bar, make("span", "n", describeStage(stage)));
  return row;
}
function describeMicrobatches(counts) {
  const shown = Object.entries(counts).filter(([, count]) => count).sort((one, other) => other[1] - one[1]);
  return `Microbatches: ${shown.map(([word, count]) => `${word} ${digits(count, 0)}`).join(", ") || "none yet"}`;
}
function showStages(stages, microbatches) {
  put("microbatches", describeMicrobatches(microbatches));
  $("stages").hidden = !stages.length;
  page.dataset.cut = stages.length ? "yes" : "no";
  $("stage-rows").replaceChildren(...stages.map(stageRow));
}
