"use strict";
// The timeline of one round, and the slider to earlier ones.

let newest = true;

function nameOf(peer) {
  const known = state.peers.get(peer);
  return known ? known.name || known.short : `..${peer.slice(-6)}`;
}
function laneRow(lane, longest) {
  const total = lane.compute + lane.exchange + lane.wait, known = state.peers.get(lane.peer);
  const late = known && known.state === "late", gone = known && known.state === "gone";
  const row = make("div", late || gone ? "lane late" : "lane"), bar = draw("svg", { role: "img" });
  let start = 0;
  for (const kind of ["compute", "exchange", "wait"]) {
    const width = 100 * lane[kind] / longest;
    bar.append(draw("rect", { class: kind, x: `${start}%`, width: `${width}%`, height: "100%" }));
    start += width;
  }
  const text = `compute ${digits(lane.compute, 1)} s, exchange ${digits(lane.exchange, 1)} s, wait ${digits(lane.wait, 1)} s, sent ${si(lane.sent)}B`;
  bar.setAttribute("aria-label", text);
  row.title = text;
  row.append(make("span", "id", nameOf(lane.peer)), bar, make("span", "n", late ? "late" : gone ? "gone" : digits(total, 1)));
  return row;
}
function showLanes(timeline) {
  put("lane-round", timeline.round == null ? "" : timeline.round + 1);
  const longest = Math.max(0, ...timeline.lanes.map((lane) => lane.compute + lane.exchange + lane.wait)) || 1;
  $("lanes").classList.toggle("few", timeline.lanes.length <= 8);
  $("lanes").replaceChildren(...timeline.lanes.map((lane) => laneRow(lane, longest)));
  const missing = !state.round ? "The first round is not finished yet." : "No peer has reported its times.";
  if (!timeline.lanes.length) $("lanes").replaceChildren(make("p", "empty", missing));
}
function showScrub() {
  const scrub = $("scrub"), last = state.timelines.length - 1;
  scrub.max = Math.max(0, last);
  if (newest) scrub.value = scrub.max;
  $("scrub-box").hidden = last < 1;  // one round needs no slider
}
async function scrubbed() {
  newest = Number($("scrub").value) >= state.timelines.length - 1;
  const number = state.timelines[Number($("scrub").value)];
  if (number == null) return;
  $("scrub").setAttribute("aria-valuetext", `round ${number + 1}`);
  const answer = await fetch(`/api/v1/timeline?round=${number}`);
  if (answer.ok) showLanes(await answer.json());
}
