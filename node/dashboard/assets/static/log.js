"use strict";
// The log. A line stands for several events of one kind; when it grows, it moves to the end and keeps its id.

const MAX_LINES = 200;
let only = null;  // show the lines of this peer only

function logLine(entry) {
  const item = make("li"), when = make("time", "", clock(entry.at));
  when.dateTime = new Date(entry.at * 1000).toISOString();
  item.append(when, make("span", entry.tone, entry.text));
  return item;
}
function addLine(line) {
  state.log = [...state.log.filter((entry) => entry.id !== line.id), line].slice(-MAX_LINES);
  showLog();
}
function showLog() {
  const lines = state.log.filter((entry) => !only || entry.peer === only).reverse();
  $("log").replaceChildren(...lines.map(logLine));
  if (!lines.length) $("log").replaceChildren(make("li", "empty", "Nothing yet: peers that join, leave or are late appear here."));
  $("filter").hidden = !only;
}
