"use strict";
// The live page. The server renders it with the current figures; this script then applies the events.
// Text from peers is inserted as text, never as HTML.

const $ = (id) => document.getElementById(id);
const page = $("page");
const NONE = "-";
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const MAX_ROUNDS = 4000, MAX_LINES = 200, STALE_MS = 6000;
let state = null, rows = [], drawn = [], byTokens = false, sort = { key: "short", down: false }, only = null, newest = true;
let lossPlot, bytesPlot, unit = [1e3, "k"], lastMessageAt = Date.now(), skew = 0;
const mine = new URLSearchParams(location.search).get("peer");

// formatting
const digits = (value, count) => value == null ? NONE : value.toLocaleString("en-US", { minimumFractionDigits: count, maximumFractionDigits: count });
const unitOf = (largest) => UNITS.find(([size]) => largest >= size) || UNITS[3];
function si(value) {
  const found = UNITS.find(([size]) => value >= 0.9995 * size);
  const [size, letter] = found || [1, ""];
  const scaled = value / size;
  return `${+(scaled < 999.5 ? scaled.toPrecision(3) : scaled.toFixed(0))}${letter ? " " + letter : ""}`;
}
function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  for (const [size, letter, below, small] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole < size) continue;
    const rest = Math.floor((whole % size) / below);
    const count = Math.floor(whole / size);
    return `${count} ${letter}${rest && count < 10 ? ` ${rest} ${small}` : ""}`;
  }
  return `${whole} s`;
}
const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
const now = () => Date.now() / 1000 - skew;
function put(id, text) {
  const node = $(id);
  if (node && node.textContent !== String(text)) node.textContent = text;
}
function make(tag, kind, text) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  if (text != null) node.textContent = text;
  return node;
}
function draw(tag, values) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(values)) node.setAttribute(name, value);
  return node;
}

// the figures at the top
function showSummary() {
  const s = state, chip = $("status");
  put("status", s.status);
  chip.className = `chip ${s.tone}`;
  put("notice", s.reason);
  put("round", s.round);
  put("age", duration(s.at - s.opened));
  put("parameters", si(s.parameters || 0));
  put("tokens", si(s.tokens));
  $("progress").hidden = s.progress == null;
  $("progress").value = s.progress || 0;
  const aim = s.target_tokens ? `of ${si(s.target_tokens)}` : s.target_rounds ? `round ${digits(s.round, 0)} of ${digits(s.target_rounds, 0)}` : "no target";
  put("target", s.seconds_left ? `${aim} · ${duration(s.seconds_left)} left` : aim);
  put("loss", digits(s.loss, 3));
  put("validation", `validation ${digits(s.validation, 3)}`);
  put("speed", si(s.tokens_per_second));
  put("active", s.active);
  put("coming", `${s.joining} joining · ${s.left_today} left today`);
  const [size, letter] = unitOf(s.sending);
  put("sending", Number((s.sending / size).toPrecision(3)).toLocaleString("en-US"));
  put("sending-unit", `${letter}B`);
  put("saved", s.saved ? `${digits(s.saved, 0)}\u00d7 below all-reduce` : "of all peers together");
  put("pace", digits(s.round_seconds, 1));
  put("in_time", s.expected ? `${s.in_time} of ${s.expected} in time` : "no round yet");
  document.title = s.loss == null ? s.run : `${digits(s.loss, 3)} · ${s.run}`;
}

// charts
function withGaps(known) {
  // Missing rounds leave a gap in the line; a thinned history has only every n-th round.
  const stride = known.length > 1 ? known[1].round - known[0].round : 1;
  return known.flatMap((row, index) => index && row.round - known[index - 1].round > 2 * stride
    ? [{ round: row.round - 1, tokens: row.tokens - 1, loss: null, validation: null, sent: null, raw: null }, row] : [row]);
}
function showCharts() {
  if (!lossPlot) return;
  drawn = withGaps(rows);
  const x = drawn.map((row) => byTokens ? row.tokens : row.round + 1);
  const last = rows[rows.length - 1];
  lossPlot.show([x, drawn.map((row) => row.loss), drawn.map((row) => row.validation)],
    last ? `Loss ${digits(last.loss, 3)} after round ${last.round + 1}` : "No round yet");
  unit = unitOf(Math.max(1, ...rows.map((row) => row.sent || row.message || 0)));
  put("bytes-unit", `${unit[1]}B`);
  const positive = (value) => value > 0 ? value / unit[0] : null;
  bytesPlot.show([drawn.map((row) => row.round + 1), drawn.map((row) => positive(row.sent)), drawn.map((row) => positive(row.raw))],
    last ? `${digits((last.sent || last.message) / unit[0], 1)} ${unit[1]}B sent per peer, ${digits(last.raw / unit[0], 1)} by all-reduce` : "No round yet");
}
function makeCharts() {
  lossPlot = lossChart($("loss-chart"), (tick) => byTokens ? si(tick) : tick % 1 ? "" : tick, (data, index) => {
    const row = drawn[index];
    return row && row.loss != null ? `round ${row.round + 1} · loss ${digits(row.loss, 4)}${row.validation == null ? "" : ` · validation ${digits(row.validation, 4)}`} · ${si(row.tokens)} tokens` : "";
  });
  bytesPlot = bytesChart($("bytes-chart"), (tick) => tick % 1 ? "" : tick, (tick) => tick.toLocaleString("en-US"), (data, index) => {
    const row = drawn[index];
    if (!row || row.loss == null) return "";
    const sent = row.sent || row.message;
    return `round ${row.round + 1} · ${digits(sent / unit[0], 1)} of ${digits(row.raw / unit[0], 0)} ${unit[1]}B${sent && row.raw ? ` · ${digits(row.raw / sent, 0)}\u00d7 less` : ""}`;
  });
}

// the timeline of one round
function nameOf(peer) {
  const known = state.peers.get(peer);
  return known ? known.name || known.short : `..${peer.slice(-6)}`;
}
function showLanes(timeline) {
  put("lane-round", timeline.round == null ? "" : timeline.round + 1);
  const total = (lane) => lane.compute + lane.exchange + lane.wait;
  const longest = Math.max(0, ...timeline.lanes.map(total)) || 1;
  $("lanes").classList.toggle("few", timeline.lanes.length <= 8);
  $("lanes").replaceChildren(...timeline.lanes.map((lane) => {
    const known = state.peers.get(lane.peer), late = known && known.state === "late", gone = known && known.gone != null;
    const row = make("div", late || gone ? "lane late" : "lane"), bar = draw("svg", { role: "img" });
    let start = 0;
    for (const kind of ["compute", "exchange", "wait"]) {
      const width = 100 * lane[kind] / longest;
      const part = draw("rect", { class: kind, x: `${start}%`, width: `${width}%`, height: "100%" });
      bar.append(part);
      start += width;
    }
    const text = `compute ${digits(lane.compute, 1)} s, exchange ${digits(lane.exchange, 1)} s, wait ${digits(lane.wait, 1)} s, sent ${si(lane.sent)}B`;
    bar.setAttribute("aria-label", text);
    row.title = text;
    row.append(make("span", "id", nameOf(lane.peer)), bar, make("span", "n", late ? "late" : gone ? "gone" : digits(total(lane), 1)));
    return row;
  }));
  if (!timeline.lanes.length) $("lanes").replaceChildren(make("p", "empty", "The first round is not finished yet."));
}
function showScrub() {
  const scrub = $("scrub"), last = state.timelines.length - 1;
  scrub.max = Math.max(0, last);
  if (newest) scrub.value = scrub.max;
  scrub.disabled = last < 1;
}
async function scrubbed() {
  newest = Number($("scrub").value) >= state.timelines.length - 1;
  const number = state.timelines[Number($("scrub").value)];
  if (number == null) return;
  const answer = await fetch(`/api/v1/timeline?round=${number}`);
  if (answer.ok) showLanes(await answer.json());
}

// the log
function logLine(entry) {
  const item = make("li"), when = make("time", "", clock(entry.at));
  when.dateTime = new Date(entry.at * 1000).toISOString();
  item.append(when, make("span", entry.tone, entry.text));
  return item;
}
function showLog() {
  const lines = state.log.filter((entry) => !only || entry.peer === only).reverse();
  $("log").replaceChildren(...lines.map(logLine));
  if (!lines.length) $("log").replaceChildren(make("p", "empty", "Nothing yet: peers that join, leave or are late appear here."));
  $("filter").hidden = !only;
}

// the peers
const spark = (speeds) => {
  const top = Math.max(...speeds, 1), step = speeds.length > 1 ? 62 / (speeds.length - 1) : 0;
  const points = speeds.map((speed, index) => `${(1 + index * step).toFixed(1)},${(15 - 13 * speed / top).toFixed(1)}`).join(" ");
  const picture = draw("svg", { viewBox: "0 0 64 16", "aria-hidden": "true" });
  picture.append(draw("polyline", { points }));
  return picture;
};
// Class, text, and the label in front of the text where rows are stacked.
const CELLS = [
  ["id", (p) => p.short, ""], ["name", (p) => p.name, ""], ["", (p) => p.device, ""], [(p) => p.tone, (p) => p.state, ""],
  ["n", (p) => p.round, "round"], ["n", (p) => si(p.tokens_per_second), "tokens/s"], ["spark", null, ""],
  ["n", (p) => digits(p.loss, 3), "loss"], ["n", (p) => digits(p.sending / 1e3, 1), "kB/s up"],
  ["n", (p) => digits(p.bytes_sent / 1e6, 2), "MB sent"], ["link", (p) => p.link, ""],
  ["n", (p) => p.accepted == null || p.accepted > 0.999 ? p.given : `${p.given} (${Math.round(100 * p.accepted)}%)`, "included"],
  ["n", (p) => duration(now() - p.seen), "seen"],
];
function cellOf([kind, , label]) {
  const cell = make("td", typeof kind === "string" ? kind : "");
  cell.dataset.label = label;
  return cell;
}
const rowOf = new Map();
function peerRow(peer) {
  let row = rowOf.get(peer.peer);
  if (!row) {
    row = make("tr");
    row.dataset.peer = peer.peer;
    row.append(...CELLS.map(cellOf));
    row.cells[0].title = "show the full id; only this peer in the log";
    row.cells[0].tabIndex = 0;
    row.cells[0].onclick = () => choose(peer.peer);
    row.cells[0].onkeydown = (event) => event.key === "Enter" && choose(peer.peer);
    rowOf.set(peer.peer, row);
  }
  CELLS.forEach(([kind, textOf], index) => {
    const cell = row.cells[index];
    if (!textOf) {
      const speeds = String(peer.speeds);
      if (cell.dataset.speeds !== speeds) { cell.dataset.speeds = speeds; cell.replaceChildren(spark(peer.speeds)); }
      return;
    }
    const text = String(textOf(peer));
    if (cell.textContent !== text && row.dataset.open !== String(index)) cell.textContent = text;
    if (typeof kind !== "string") cell.className = kind(peer);
  });
  row.className = [peer.gone == null ? "" : "gone", peer.peer === mine ? "mine" : ""].join(" ").trim();
  return row;
}
function choose(peer) {
  only = only === peer ? null : peer;
  for (const [name, row] of rowOf) {
    row.dataset.open = name === only ? "0" : "";
    row.cells[0].textContent = name === only ? name : state.peers.get(name).short;
  }
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
function showPeers() {
  const shown = [...state.peers.values()].filter((peer) => peer.gone == null || state.at - peer.gone < 600);
  const value = (peer) => peer[sort.key] ?? -Infinity;
  shown.sort((a, b) => {
    const first = (a.gone != null) - (b.gone != null) || (b.peer === mine) - (a.peer === mine);
    const order = value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.peer < b.peer ? -1 : 1;
    return first || (sort.down ? -order : order);
  });
  for (const name of [...rowOf.keys()]) if (!state.peers.has(name)) rowOf.delete(name);
  const body = $("peers"), tableRows = shown.map(peerRow);
  if (!tableRows.length) {
    const line = $("join") ? `No peers visible. Run: ${$("join").textContent}` : "No peers.", empty = make("td", "empty", line);
    empty.colSpan = CELLS.length;
    const row = make("tr");
    row.append(empty);
    tableRows.push(row);
  }
  if (tableRows.length !== body.rows.length || tableRows.some((row, index) => body.rows[index] !== row)) body.replaceChildren(...tableRows);
}

// messages from the server
function begin(snapshot) {
  state = { ...snapshot, peers: new Map(snapshot.peers.map((peer) => [peer.peer, peer])) };
  skew = Date.now() / 1000 - snapshot.at;
  showSummary();
  showPeers();
  showLog();
  showScrub();
  if (newest) showLanes(snapshot.timeline);
  showMine();
}
function setHistory(columns) {
  const names = Object.keys(columns);
  rows = columns.round.map((_, index) => Object.fromEntries(names.map((name) => [name, columns[name][index]])));
  showCharts();
}
function committed(event) {
  const given = event.given, count = Math.max(1, given.length), sum = (key) => given.reduce((total, one) => total + one[key], 0);
  const tokens = Math.max(1, sum("tokens")), steps = sum("steps") / count;
  rows.push({ round: event.round, tokens: event.tokens, loss: given.reduce((total, one) => total + one.loss * one.tokens, 0) / tokens,
    message: sum("size") / count, raw: 2 * (count - 1) / count * 4 * (state.parameters || 0) * steps, sent: null, validation: null });
  if (rows.length > MAX_ROUNDS) rows = rows.filter((_, index) => index % 2 || index === rows.length - 1);
}
function timed(event) {
  const row = rows.find((one) => one.round === event.round);
  if (row && event.lanes.length) row.sent = event.lanes.reduce((total, lane) => total + lane.sent, 0) / event.lanes.length;
  state.timelines = [...state.timelines, event.round].slice(-50);
  if (newest) showLanes(event);
  showScrub();
}
function happened(event) {
  if (!state) return;
  lastMessageAt = Date.now();
  state.index = Number(event.lastEventId) + 1;
  const values = JSON.parse(event.data);
  if (values.kind === "committed") committed(values);
  if (values.kind === "timed") timed(values);
  if (values.kind === "measured") { const row = rows.find((one) => one.round === values.round - 1); if (row) row.validation = values.loss; }
  if (values.kind === "forked") rows = rows.filter((row) => row.round < values.round);
  if (["committed", "timed", "measured", "forked"].includes(values.kind)) showChartsSoon();
  if (["joined", "left", "started"].includes(values.kind)) refreshSoon();
  if (values.text) {
    state.log = [...state.log, { at: values.at, peer: values.peer || null, text: values.text, tone: values.tone }].slice(-MAX_LINES);
    showLog();
  }
}
function moment(event) {
  if (!state) return;
  lastMessageAt = Date.now();
  const { moved, ...figures } = JSON.parse(event.data);
  Object.assign(state, figures);
  skew = Date.now() / 1000 - figures.at;
  for (const peer of moved) state.peers.set(peer.peer, peer);
  showSummary();
  showPeers();
}
const later = (work, pause) => { let waiting = false; return () => { if (waiting) return; waiting = true; setTimeout(() => { waiting = false; work(); }, pause); }; };
const showChartsSoon = later(showCharts, 250);
const refreshSoon = later(refresh, 200);
async function refresh() {
  const answer = await fetch("/api/v1/state");
  if (answer.ok) begin(await answer.json());
  return answer.ok;
}
async function loadHistory() {
  const answer = await fetch("/api/v1/history?max=2000");
  if (answer.ok) setHistory(await answer.json());
  return answer.ok;
}
function listen() {
  const source = new EventSource(`/api/v1/events?after=${state.index - 1}`);
  for (const kind of ["opened", "started", "joined", "left", "committed", "timed", "measured", "strayed", "forked", "missing", "lost", "found"])
    source.addEventListener(kind, happened);
  source.addEventListener("now", moment);
  source.addEventListener("state", (event) => { lastMessageAt = Date.now(); begin(JSON.parse(event.data)); loadHistory(); });
  source.addEventListener("open", () => { lastMessageAt = Date.now(); });
  source.addEventListener("error", () => { if (source.readyState === EventSource.CLOSED) { setTimeout(listen, 3000); } });
}
function watchHost() {
  const silent = Date.now() - lastMessageAt;
  const stale = silent > STALE_MS;
  page.classList.toggle("stale", stale || (state && state.lost != null));
  if (stale) {
    put("status", "host unreachable");
    $("status").className = "chip bad";
    put("notice", `The host has not answered for ${duration(silent / 1000)}. The page shows the last known figures; training continues without the host.`);
  }
}

// controls
function byClick() {
  $("by").onclick = () => {
    byTokens = !byTokens;
    put("by", byTokens ? "by round" : "by tokens");
    put("axis", byTokens ? "tokens" : "round");
    showCharts();
  };
  $("scrub").oninput = scrubbed;
  $("filter").onclick = () => choose(only);
  for (const head of document.querySelectorAll("th[data-key]")) {
    head.tabIndex = 0;
    const turn = () => {
      sort = { key: head.dataset.key, down: sort.key === head.dataset.key ? !sort.down : head.classList.contains("n") };
      for (const other of document.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      showPeers();
    };
    head.onclick = turn;
    head.onkeydown = (event) => event.key === "Enter" && turn();
  }
  if ($("copy")) $("copy").onclick = async () => {
    try {
      await navigator.clipboard.writeText($("join").textContent);
      put("copy", "Copied");
    } catch {
      getSelection().selectAllChildren($("join"));  // only an https page may write to the clipboard
      put("copy", "Press Ctrl-C");
    }
    setTimeout(() => put("copy", "Copy"), 2000);
  };
}
async function firstLook() {
  try {
    return await refresh() && await loadHistory();
  } catch {
    return false;  // no answer: `watchHost` shows it
  }
}
async function start() {
  document.documentElement.classList.remove("no-script");
  byClick();
  makeCharts();
  if (page.dataset.live === "yes") setInterval(watchHost, 1000);
  while (!await firstLook()) await new Promise((done) => setTimeout(done, 3000));
  if (page.dataset.live === "yes") listen();
}
start();
