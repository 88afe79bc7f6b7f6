"use strict";
// The rows of the history, and the charts of them: axis, smoothing and zoom.

const MAX_ROUNDS = 4000;
const SMOOTHING = [1, 2, 4, 8, 16, 32, 64, 128];  // rounds, by position of the slider
let rows = [], shown = [], axisName = "round", zoom = null, unit = [1e3, "k"], baseline = [];
let lossPlot, bytesPlot, rewardPlot;

const view = {
  range: () => zoom || fullRange(shown),
  zoom: (range) => { zoom = range && within(range, fullRange(shown)); showCharts(); },
  tick: (tick) => axisName === "tokens" ? si(tick) : axisName === "time" ? duration(tick) : tick % 1 ? "" : tick.toLocaleString("en-US"),
  steps: () => axisName === "time" ? TIME_STEPS : axisName === "round" ? ROUND_STEPS : TOKEN_STEPS,
};
const STEPS = [1, 2, 5];
const decadesOf = (first, last) => Array.from({ length: last - first }, (_, place) => STEPS.map((digit) => digit * 10 ** (first + place))).flat();
const ROUND_STEPS = decadesOf(0, 9), TOKEN_STEPS = decadesOf(0, 16);

function setHistory(columns) {
  const names = Object.keys(columns);
  rows = columns.round.map((_, index) => Object.fromEntries(names.map((name) => [name, columns[name][index]])));
  showCharts();
}
function addRound(event, parameters) {
  const given = event.given, count = Math.max(1, given.length), sum = (key) => given.reduce((total, one) => total + one[key], 0);
  const tokens = Math.max(1, sum("tokens")), steps = sum("steps") / count;
  rows.push({ round: event.round, at: event.at, tokens: event.tokens, loss: given.reduce((total, one) => total + one.loss * one.tokens, 0) / tokens,
    message: sum("size") / count, raw: 2 * (count - 1) / count * 4 * parameters * steps, sent: null, validation: null, reward: null });
  if (rows.length > MAX_ROUNDS) rows = rows.filter((_, index) => index % 2 || index === rows.length - 1);
}
const noRows = () => state && state.round ? "The rounds are being loaded" : "No round yet";
const rowOfRound = (round) => rows.find((one) => one.round === round);

function showCharts() {
  if (!lossPlot) return;
  shown = onAxis(withGaps(rows), axisName, state ? state.opened : 0);
  if (zoom) zoom = within(zoom, fullRange(shown));
  const x = shown.map((row) => row.x), count = SMOOTHING[Number($("smooth").value)];
  const losses = shown.map((row) => row.reward == null ? row.loss : null), last = rows[rows.length - 1];
  const smooth = count > 1;
  lossPlot.show([x, smooth ? losses : losses.map(() => null), smooth ? smoothed(losses, count) : losses, shown.map((row) => row.validation)],
    last ? `Loss ${digits(last.loss, 3)} after round ${last.round + 1}` : noRows());
  showRewards(x, count);
  unit = unitOf(Math.max(1, ...rows.map((row) => row.sent || row.message || 0)));
  put("bytes-unit", `${unit[1]}B`);
  const positive = (value) => value > 0 ? value / unit[0] : null;
  baseline = runningMean(shown.map((row) => positive(row.raw)), BASELINE_ROUNDS);
  const sent = shown.map((row) => positive(row.sent));
  bytesPlot.show([x, smooth ? smoothed(sent, count) : sent, baseline],
    last ? `${digits((last.sent || last.message) / unit[0], 1)} ${unit[1]}B sent per peer, ${digits(last.raw / unit[0], 1)} by all-reduce` : noRows());
  $("chart-tools").hidden = shown.length < 2;
  for (const id of ["zoom-out", "zoom-all", "earlier", "later"]) $(id).disabled = !zoom;
  $("zoom-in").disabled = Boolean(zoom) && zoomedBy(zoom, fullRange(shown), 0.5)[1] === zoom[1];
}
function showRewards(x, count) {
  const known = rows.filter((row) => row.reward != null), newest = known[known.length - 1];
  $("rewards").hidden = !newest;
  if (!newest) return;
  const rewards = shown.map((row) => row.reward ?? null);
  rewardPlot = rewardPlot || rewardChart($("reward-chart"), view, describeReward);
  rewardPlot.show([x, count > 1 ? smoothed(rewards, count) : rewards], `Score ${digits(newest.reward, 3)} after round ${newest.round + 1}`);
}
function describeReward(index) {
  const row = shown[index];
  return row && row.reward != null ? `round ${row.round + 1} \u00b7 score ${digits(row.reward, 3)}` : "";
}
function describeLoss(index) {
  const row = shown[index];
  if (!row || row.loss == null) return "";
  const validation = row.validation == null ? "" : ` · validation ${digits(row.validation, 4)}`;
  const word = row.reward == null ? "loss" : "entropy of answers";
  return `round ${row.round + 1} · ${word} ${digits(row.loss, 4)}${validation} · ${si(row.tokens)} tokens`;
}
function describeBytes(index) {
  const row = shown[index], all = baseline[index];
  if (!row || row.loss == null) return "";
  const sent = (row.sent || row.message) / unit[0];
  const compared = all ? ` of ${digits(all, 0)} ${unit[1]}B · ${digits(all / sent, 0)}\u00d7 less` : ` ${unit[1]}B`;
  return `round ${row.round + 1} · ${digits(sent, 1)}${compared}`;
}
function makeCharts() {
  lossPlot = lossChart($("loss-chart"), view, describeLoss);
  bytesPlot = bytesChart($("bytes-chart"), view, (tick) => tick.toLocaleString("en-US"), describeBytes);
  const full = () => fullRange(shown);
  $("axis").onchange = () => { axisName = $("axis").value; zoom = null; showCharts(); };
  $("smooth").oninput = () => {
    const count = SMOOTHING[Number($("smooth").value)];
    $("smooth").setAttribute("aria-valuetext", count > 1 ? `over ${count} rounds` : "none");
    showCharts();
  };
  $("zoom-in").onclick = () => { zoom = zoomedBy(zoom, full(), 0.5); showCharts(); };
  $("zoom-out").onclick = () => { zoom = zoomedBy(zoom, full(), 2); showCharts(); };
  $("zoom-all").onclick = () => view.zoom(null);
  $("earlier").onclick = () => { zoom = movedBy(zoom, full(), -0.5); showCharts(); };
  $("later").onclick = () => { zoom = movedBy(zoom, full(), 0.5); showCharts(); };
  showCharts();
}
