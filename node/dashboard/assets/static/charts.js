"use strict";
// The uPlot charts: colours from the page's CSS variables, widths that follow their boxes, a line of text on hover.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const FEW_POINTS = 4;  // a line through so few has dots
const MINUTE = 60, HOUR = 3600, DAY = 86400;
const TIME_STEPS = [1, 2, 5, 10, 20, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 20 * MINUTE, 30 * MINUTE, HOUR,
  2 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 5 * DAY, 10 * DAY, 20 * DAY, 50 * DAY, 100 * DAY];

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
      const text = index == null || plot.cursor.left < 0 ? "" : words(index);
      tip.hidden = !text;
      if (!text) return;
      tip.textContent = text;
      const left = plot.cursor.left, room = plot.over.clientWidth - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(0, Math.min(left + 12, room))}px`;
      tip.style.top = "4px";
    },
  } };
}

// A chart over the range that `view.range()` returns. Dragging calls `view.zoom(range)`, a double click `view.zoom(null)`.
class Chart {
  constructor(box, view, options, words) {
    this.box = box;
    const size = () => ({ width: Math.max(160, box.clientWidth), height: Math.max(100, box.clientHeight) });
    const x = axis((plot, ticks) => ticks.map(view.tick), 30, false);
    x.incrs = () => view.steps();
    x.space = 64;
    const scales = { x: { time: false, range: () => view.range() }, y: options.y };
    const selected = (plot) => {
      const { left, width } = plot.select;
      if (width < 4) return;
      view.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
      plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    };
    this.plot = new uPlot({ ...size(), legend: { show: false }, padding: [10, 24, 0, 0],
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 7 }, bind: { dblclick: () => () => { view.zoom(null); } } },
      plugins: [tipPlugin(words)], hooks: { setSelect: [selected] }, scales, axes: [x, options.axis], series: [{}, ...options.series],
    }, [[], ...options.series.map(() => [])], box);
    new ResizeObserver(() => { if (box.clientWidth) this.plot.setSize(size()); }).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot.redraw(false, true));
  }

  show(columns, label) {
    this.box.classList.toggle("blank", !columns[0].length);  // no axes without a round
    this.plot.setData(columns);
    this.box.setAttribute("aria-label", label);
  }
}

const line = (name, dash, width) => ({ stroke: () => colour(name), width: width || 1.75, spanGaps: true,
  points: { show: (plot) => plot.data[0].length < FEW_POINTS, size: 6, fill: () => colour(name), stroke: () => colour(name) }, dash });

function lossChart(box, view, words) {
  return new Chart(box, view, {
    y: { range: (plot, low, high) => low == null ? [0, 1] : uPlot.rangeNum(low, high, 0.08, false) },
    axis: { ...axis((plot, ticks) => ticks.map((tick) => +tick.toFixed(4)), 46, true), space: 20 },  // several ticks
    series: [{ ...line("pale", undefined, 1), spanGaps: false }, { ...line("busy"), spanGaps: false }, line("warn", [5, 4], 1.5)],
  }, words);
}

function rewardChart(box, view, words) {
  return new Chart(box, view, {
    y: { range: () => [0, 1] }, axis: { ...axis((plot, ticks) => ticks.map((tick) => +tick.toFixed(2)), 46, true), space: 20 },
    series: [line("ok")],
  }, words);
}

function logRange(plot, low, high) {
  const floor = Math.floor(Math.log10(Math.max(low || 0, 1e-6))), top = Math.ceil(Math.log10(Math.max(high || 0, 1e-5)));
  return [10 ** floor, 10 ** Math.max(top, floor + 1)];
}

function bytesChart(box, view, yWords, words) {
  // On a log axis only the powers of ten have a label and a grid line.
  const decades = (plot, ticks) => ticks.map((tick) => Math.abs(Math.log10(tick) % 1) < 1e-6 ? tick : null);
  const shown = axis((plot, ticks) => ticks.map((tick) => tick === null ? "" : yWords(tick)), 58, true);
  shown.filter = decades;
  shown.grid.filter = decades;
  return new Chart(box, view, {
    y: { distr: 3, log: 10, range: logRange }, axis: shown, series: [line("ok"), line("dim", [5, 4], 1.5)],
  }, words);
}
