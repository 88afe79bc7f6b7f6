"use strict";
// The top of the page: facts, figures, warnings; and the newest sample.

function showSummary() {
  const s = state, chip = $("status");
  put("status", s.status);
  chip.className = `chip ${s.tone}`;
  put("notice", s.reason);
  $("notice").className = `notice ${s.tone}`;
  put("round", s.round);
  put("age", duration(Math.floor(s.at - s.opened)));
  put("parameters", si(s.parameters || 0));
  put("tokens", si(s.tokens));
  $("progress").hidden = s.progress == null;
  $("progress").value = s.progress || 0;
  const aim = s.target_tokens ? `of ${si(s.target_tokens)}` : s.target_rounds ? `round ${digits(s.round, 0)} of ${digits(s.target_rounds, 0)}` : "no target";
  put("target", s.seconds_left ? `${aim} · ${duration(s.seconds_left)} left` : aim);
  put("loss", digits(s.loss, 3));
  const sources = Object.entries(s.validation_by_source).map(([name, loss]) => `${name} ${digits(loss, 3)}`).join(", ");
  const meaning = s.reward == null ? "of the peers' own weights" : "the entropy of answers, while scores are learned";
  put("validation", `${meaning}; of the shared model: validation ${digits(s.validation, 3)}${sources && ` (${sources})`}`);
  put("speed", si(s.tokens_per_second));
  put("active", s.active);
  put("coming", `${s.joining} joining · ${s.left_today} left today`);
  const [size, letter] = unitOf(s.sending);
  put("sending", Number((s.sending / size).toPrecision(3)).toLocaleString("en-US"));
  put("sending-unit", `${letter}B`);
  put("saved", s.saved ? `${digits(s.saved, 0)}\u00d7 below all-reduce` : "of all peers together");
  put("pace", digits(s.round_seconds, 1));
  put("in_time", s.round ? `${s.in_time} of ${s.expected} in time${s.stages.length ? " at the last stage" : ""}` : "no round yet");
  document.title = s.loss == null ? s.run : `${digits(s.loss, 3)} · ${s.run}`;
  for (const line of document.querySelectorAll(".no-round")) line.hidden = s.round > 0;
  showWarnings(s.warnings);
  showModel(s.model);
}
function showModel(model) {
  const line = $("model");
  line.hidden = !model;
  if (!model) return;
  const text = `${model.is_final ? "The final model" : "The model"}, after round ${digits(model.round, 0)} (${si(model.size)}B): `;
  if (line.firstChild && line.firstChild.textContent === text) return;
  const link = make("a", "", "download");
  link.href = "/model";
  line.replaceChildren(text, link);
}
function showWarnings(sentences) {
  const box = $("warnings"), shownText = [...box.children].map((line) => line.textContent);
  if (String(shownText) !== String(sentences)) box.replaceChildren(...sentences.map((sentence) => make("p", "", sentence)));
}
function showSample(sample) {
  const box = $("sample");
  box.hidden = !sample;
  if (!sample) return;
  const text = make("pre");
  text.append(make("b", "", sample.prompt), sample.text);
  box.replaceChildren(make("h2", "", `Text that the model writes after round ${sample.round}`), text);
}
