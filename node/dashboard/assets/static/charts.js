"use strict";
// Two uPlot charts: colours from the page's CSS variables, widths that follow their boxes, a line of text on hover.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

function axis(values, size, grid) {
  return { stroke: () => colour("dim"), font: FONT, size, gap: 6, values,
    grid: grid ? { stroke: () => colour("line"), width: 1 } : { show: false },
    ticks: { show: false } };
}

function tipPlugin(words) {
  let tip;
  return { hooks: {
    init: (plot) => {
      tip = document.createElement("div");
      tip.className = "tip";
      tip.hidden = true;
      plot.over.append(tip);
    },
    setCursor: (plot) => {
      const index = plot.cursor.idx;
      tip.hidden = index == null || plot.cursor.left < 0;
      if (tip.hidden) return;
      tip.textContent = words(plot.data, index);
      const left = plot.cursor.left, room = plot.over.clientWidth - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(0, Math.min(left + 12, room))}px`;
      tip.style.top = "4px";
    },
  } };
}

class Chart {
  constructor(box, options, words) {
    this.box = box;
    const size = () => ({ width: Math.max(160, box.clientWidth), height: box.clientHeight });
    this.plot = new uPlot({ ...size(), legend: { show: false }, padding: [10, 8, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
      plugins: [tipPlugin(words)], ...options }, options.series.map(() => []), box);
    new ResizeObserver(() => this.plot.setSize(size())).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot.redraw(false, true));
  }

  show(columns, label) {
    this.plot.setData(columns);
    this.box.setAttribute("aria-label", label);
  }
}

const line = (name, dash, width) => ({ stroke: () => colour(name), width: width || 1.75, spanGaps: true, points: { show: false }, dash });

function lossChart(box, xWords, words) {
  return new Chart(box, {
    scales: { x: { time: false }, y: { range: (plot, low, high) => uPlot.rangeNum(low, high, 0.08, false) } },
    axes: [axis((plot, ticks) => ticks.map(xWords), 30, false), axis((plot, ticks) => ticks.map((tick) => +tick.toFixed(4)), 46, true)],
    series: [{}, { ...line("busy"), spanGaps: false }, line("warn", [5, 4], 1.5)],
  }, words);
}

function logRange(plot, low, high) {
  const floor = Math.floor(Math.log10(Math.max(low, 1e-6))), top = Math.ceil(Math.log10(Math.max(high, 1e-5)));
  return [10 ** floor, 10 ** Math.max(top, floor + 1)];
}

function bytesChart(box, xWords, yWords, words) {
  // On a log axis only the powers of ten have a label and a grid line.
  const decades = (plot, ticks) => ticks.map((tick) => Math.abs(Math.log10(tick) % 1) < 1e-6 ? tick : null);
  const shown = axis((plot, ticks) => ticks.map((tick) => tick === null ? "" : yWords(tick)), 58, true);
  shown.filter = decades;
  shown.grid.filter = decades;
  return new Chart(box, {
    scales: { x: { time: false }, y: { distr: 3, log: 10, range: logRange } },
    axes: [axis((plot, ticks) => ticks.map(xWords), 30, false), shown],
    series: [{}, line("ok"), line("dim", [5, 4], 1.5)],
  }, words);
}
