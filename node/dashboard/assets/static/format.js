"use strict";
// Numbers for people, as node/units.py writes them.

const NONE = "-";
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

const digits = (value, count) => value == null ? NONE : value.toLocaleString("en-US", { minimumFractionDigits: count, maximumFractionDigits: count });
const unitOf = (largest) => UNITS.find(([size]) => largest >= size) || UNITS[3];
const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
const share = (value) => value == null ? NONE : `${digits(100 * value, 1)}%`;

function si(value) {
  const found = UNITS.find(([size]) => value >= 0.9995 * size);
  const [size, letter] = found || [1, ""];
  const scaled = value / size;
  return `${+(scaled < 999.5 ? scaled.toPrecision(3) : scaled.toFixed(0))}${letter ? " " + letter : ""}`;
}
function short(value) {
  if (value == null) return NONE;
  if (value === 0 || Math.abs(value) >= 1e-3) return Math.abs(value) < 1000 ? String(+value.toPrecision(3)) : si(value);
  const [mantissa, exponent] = value.toExponential(2).split("e");
  return `${+mantissa}e${+exponent}`;
}
function duration(seconds) {
  if (seconds > 0 && seconds < 0.9995) return `${+(1000 * seconds).toPrecision(3)} ms`;
  if (seconds < 9.95) return `${+Math.max(0, seconds).toFixed(1)} s`;
  const whole = Math.round(seconds);
  for (const [size, letter, below, small] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole < size) continue;
    const rest = Math.floor((whole % size) / below);
    const count = Math.floor(whole / size);
    return `${count} ${letter}${rest && count < 10 ? ` ${rest} ${small}` : ""}`;
  }
  return `${whole} s`;
}
