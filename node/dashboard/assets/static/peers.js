"use strict";
// The table of peers. The server describes the columns in the header's attributes (node/dashboard/peer_columns.py).

const GONE_SECONDS = 600;  // that a departed peer stays in the table
const mine = new URLSearchParams(location.search).get("peer");
const rowOf = new Map();
let columns = [], sort = { key: "short", down: false };

const FORMATS = {
  text: (value) => value,
  state: (value) => value,
  count: (value) => digits(value, 0),
  si: (value) => value == null ? NONE : si(value),
  short,
  share,
  decimal: (value, column) => value == null ? NONE : digits(value / column.unit, column.digits),
  age: (value) => duration(Math.floor(now() - value)),
};
function readColumns() {
  columns = [...document.querySelectorAll("#peers-head th")].map((head) => ({ ...head.dataset, head, css: head.className,
    digits: Number(head.dataset.digits), unit: Number(head.dataset.unit) }));
}
function spark(speeds) {
  const top = Math.max(...speeds, 1), step = speeds.length > 1 ? 62 / (speeds.length - 1) : 0;
  const points = speeds.map((speed, index) => `${(1 + index * step).toFixed(1)},${(15 - 13 * speed / top).toFixed(1)}`).join(" ");
  const picture = draw("svg", { viewBox: "0 0 64 16", "aria-hidden": "true" });
  picture.append(draw("polyline", { points }));
  return picture;
}
function newRow(peer) {
  const row = make("tr");
  row.dataset.peer = peer.peer;
  for (const column of columns) {
    const cell = make("td", column.css);
    cell.dataset.label = column.label;
    row.append(cell);
  }
  const button = make("button", "plain id", peer.short);
  button.type = "button";
  button.title = "show the full id; only this peer in the log";
  button.onclick = () => choose(peer.peer);
  row.cells[0].append(button);
  return row;
}
function peerRow(peer) {
  const row = rowOf.get(peer.peer) || newRow(peer);
  rowOf.set(peer.peer, row);
  columns.forEach((column, index) => {
    const cell = row.cells[index], value = peer[column.key];
    if (index === 0) return;
    if (column.format === "spark") {
      const speeds = String(value);
      if (cell.dataset.speeds !== speeds) { cell.dataset.speeds = speeds; cell.replaceChildren(spark(value)); }
      return;
    }
    const text = value == null && column.optional === "yes" ? "" : String(FORMATS[column.format](value, column));
    if (cell.textContent !== text) cell.textContent = text;
    if (column.format === "state") cell.className = `${column.css} ${peer.tone}`;
  });
  row.className = [peer.state === "gone" ? "gone" : "", peer.peer === mine ? "mine" : ""].join(" ").trim();
  return row;
}
function choose(peer) {
  only = only === peer ? null : peer;
  for (const [name, row] of rowOf) row.cells[0].firstChild.textContent = name === only ? name : state.peers.get(name).short;
  showLog();
  showMine();
}
function showMine() {
  const box = $("mine"), peer = only || mine;
  box.replaceChildren();
  if (!peer) return;
  const link = make("a", "", peer === mine ? "your node" : "link to this node");
  link.href = `?peer=${encodeURIComponent(peer)}`;
  box.append(link);
}
function isShown(peer) {
  return peer.gone == null || state.status === "done" || state.at - peer.gone < GONE_SECONDS;
}
function showPeers() {
  const value = (peer) => peer[sort.key] ?? -Infinity;
  const listed = [...state.peers.values()].filter(isShown).sort((a, b) => {
    const first = (a.gone != null) - (b.gone != null) || (b.peer === mine) - (a.peer === mine);
    const order = value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.peer < b.peer ? -1 : 1;
    return first || (sort.down ? -order : order);
  });
  for (const name of [...rowOf.keys()]) if (!state.peers.has(name)) rowOf.delete(name);
  const tableRows = listed.length ? listed.map(peerRow) : [emptyRow()];
  const body = $("peers");
  if (tableRows.length !== body.rows.length || tableRows.some((row, index) => body.rows[index] !== row)) body.replaceChildren(...tableRows);
  hideUnknown(listed);
}
function hideUnknown(listed) {
  columns.forEach((column, index) => {
    if (column.optional !== "yes") return;
    const isUnknown = listed.every((peer) => peer[column.key] == null);
    for (const cell of [column.head, ...listed.map((peer) => rowOf.get(peer.peer).cells[index])]) cell.hidden = isUnknown;
  });
}
function emptyRow() {
  const line = $("join") ? `No peers visible. Run: ${$("join").textContent}` : "No peers.";
  const row = make("tr"), cell = make("td", "empty", line);
  cell.colSpan = columns.length;
  row.append(cell);
  return row;
}
function showView(name) {
  $("peer-table").dataset.view = name;
  for (const button of document.querySelectorAll("[data-show]")) button.setAttribute("aria-pressed", String(button.dataset.show === name));
}
function bindPeers() {
  readColumns();
  for (const button of document.querySelectorAll("[data-show]")) button.onclick = () => showView(button.dataset.show);
  showView("now");
  for (const { head, key, format } of columns) {
    const button = head.querySelector("button");
    if (!button) continue;
    button.onclick = () => {
      const isText = format === "text" || format === "state";
      sort = { key, down: sort.key === key ? !sort.down : !isText };
      for (const other of columns) other.head.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      showPeers();
    };
  }
}
