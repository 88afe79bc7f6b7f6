"use strict";
// Columns for the charts, from the rows of the history. Pure.

const BASELINE_ROUNDS = 32;  // over which the all-reduce baseline is averaged, because peers and steps vary by round

function smoothed(values, count) {
  // Returns the mean of the known values at most `count` / 2 places away, so that the line does not lag. At the start,
  // where the loss falls steeply, as many values are taken after as before.
  const half = Math.floor(count / 2), sums = [0], counts = [0];
  for (const value of values) {
    sums.push(sums[sums.length - 1] + (value ?? 0));
    counts.push(counts[counts.length - 1] + (value == null ? 0 : 1));
  }
  return values.map((value, index) => {
    if (value == null) return null;
    const reach = Math.min(half, index), low = index - reach, high = Math.min(values.length, index + reach + 1);
    return (sums[high] - sums[low]) / (counts[high] - counts[low]);
  });
}
function runningMean(values, count) {
  // Returns the mean of the last `count` known values, so that it has a value wherever one was known before.
  const last = [];
  let sum = 0;
  return values.map((value) => {
    if (value != null) {
      last.push(value);
      sum += value;
      if (last.length > count) sum -= last.shift();
    }
    return last.length ? sum / last.length : null;
  });
}
function withGaps(known) {
  // Missing rounds leave a gap in the line; a thinned history has only every n-th round.
  const stride = known.length > 1 ? known[1].round - known[0].round : 1;
  return known.flatMap((row, index) => index && row.round - known[index - 1].round > 2 * stride
    ? [{ round: row.round - 1, tokens: row.tokens - 1, at: row.at == null ? null : row.at - 1e-3, loss: null, validation: null, sent: null, raw: null }, row] : [row]);
}
const AXES = {
  round: (row) => row.round + 1,
  time: (row, opened) => row.at == null ? null : Math.max(0, row.at - opened),
  tokens: (row) => row.tokens,
};
function onAxis(rows, axis, opened) {
  // Returns the rows that have a place on the axis, in ascending order of it.
  let newest = -Infinity;
  return rows.map((row) => ({ ...row, x: AXES[axis](row, opened) })).filter((row) => {
    if (row.x == null || row.x < newest) return false;
    newest = row.x;
    return true;
  });
}
const fullRange = (rows) => rows.length > 1 && rows[0].x < rows[rows.length - 1].x
  ? [rows[0].x, rows[rows.length - 1].x] : rows.length ? [rows[0].x - 1, rows[0].x + 1] : [0, 1];

function zoomedBy(range, full, factor) {
  // Returns a range that is `factor` times as wide around the same centre; null means everything.
  const [low, high] = range || full, centre = (low + high) / 2, half = factor * (high - low) / 2;
  return within([centre - half, centre + half], full);
}
function movedBy(range, full, part) {
  // Returns the range moved by a part of its width.
  if (!range) return null;
  const step = part * (range[1] - range[0]);
  return within([range[0] + step, range[1] + step], full);
}
function within([low, high], full) {
  // Returns the range moved into the full one; null if it is as wide, and at least a thousandth of it.
  const width = Math.max(high - low, (full[1] - full[0]) / 1000);
  if (width >= full[1] - full[0]) return null;
  const start = Math.min(Math.max(low, full[0]), full[1] - width);
  return [start, start + width];
}
