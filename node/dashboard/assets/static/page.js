"use strict";
// The live page. The server renders it with the current figures; these scripts then apply the events.

const page = $("page");
const STALE_MS = 6000;
const KINDS = ["opened", "started", "joined", "left", "committed", "timed", "measured", "scored", "sampled", "evaluated", "steered", "strayed", "forked", "missing", "lost", "found"];
let state = null, lastMessageAt = Date.now(), skew = 0;
const now = () => Date.now() / 1000 - skew;

// messages from the server
function begin(snapshot) {
  state = { ...snapshot, peers: new Map(snapshot.peers.map((peer) => [peer.peer, peer])) };
  skew = Date.now() / 1000 - snapshot.at;
  showSummary();
  showPeers();
  showLog();
  showScrub();
  showStages(state.stages, state.microbatches);
  if (newest) showLanes(snapshot.timeline);
  showMine();
  showSample(snapshot.sample);
  if (snapshot.about) showAbout(snapshot.about);
  showSteering(snapshot.revisions);
  showEvaluations(snapshot.evaluations);
  showEnd();
}
const HANDLERS = {
  committed: (event) => { addRound(event, state.parameters || 0); showChartsSoon(); },
  timed: (event) => {
    const row = rowOfRound(event.round);
    if (row && event.lanes.length) row.sent = event.lanes.reduce((total, lane) => total + lane.sent, 0) / event.lanes.length;
    state.timelines = [...state.timelines, event.round].slice(-50);
    if (newest) showLanes(event);
    showScrub();
    showChartsSoon();
  },
  measured: (event) => {
    const row = rowOfRound(event.round - 1);
    if (row) row.validation = event.loss;
    showChartsSoon();
  },
  scored: (event) => {
    const row = rowOfRound(event.round);
    if (row) row.reward = event.reward;
    showChartsSoon();
  },
  forked: (event) => { rows = rows.filter((row) => row.round < event.round); showChartsSoon(); },
  sampled: showSample,
  steered: () => refreshSoon(),
  evaluated: () => refreshSoon(),
  joined: () => refreshSoon(),
  left: () => refreshSoon(),
  started: () => refreshSoon(),
};
function happened(event) {
  if (!state) return;
  lastMessageAt = Date.now();
  state.index = Number(event.lastEventId) + 1;
  const values = JSON.parse(event.data), handle = HANDLERS[values.kind];
  if (handle) handle(values);
  if (values.line) addLine(values.line);
}
function moment(event) {
  if (!state) return;
  lastMessageAt = Date.now();
  const { moved, ...figures } = JSON.parse(event.data);
  Object.assign(state, figures);
  skew = Date.now() / 1000 - figures.at;
  for (const peer of moved) state.peers.set(peer.peer, peer);
  showSummary();
  showStages(state.stages, state.microbatches);
  showPeers();
  showEnd();
}
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
  for (const kind of KINDS) source.addEventListener(kind, happened);
  source.addEventListener("now", moment);
  source.addEventListener("state", (event) => { lastMessageAt = Date.now(); begin(JSON.parse(event.data)); loadHistory(); });
  source.addEventListener("open", () => { lastMessageAt = Date.now(); });
  source.addEventListener("error", () => { if (source.readyState === EventSource.CLOSED) { setTimeout(listen, 3000); } });
}
function watchHost() {
  const silent = Date.now() - lastMessageAt, isSilent = silent > STALE_MS;
  const isOver = Boolean(state) && (Boolean(state.end_version) || state.status === "empty");
  page.classList.toggle("stale", (isSilent && !isOver) || Boolean(state && state.lost != null && state.tone === "bad"));
  if (isSilent && isOver) put("notice", `${state.reason}; the host has stopped, and these are the last figures`);
  if (isSilent && !isOver) {
    put("status", "host unreachable");
    $("status").className = "chip bad";
    $("notice").className = "notice bad";
    put("notice", `The host has not answered for ${duration(Math.floor(silent / 1000))}. The page shows the last known figures; training continues without the host.`);
  }
}

// controls
function bindCopy() {
  if (!$("copy")) return;
  $("copy").onclick = async () => {
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
  $("scrub").oninput = scrubbed;
  $("filter").onclick = () => choose(only);
  bindPeers();
  bindCopy();
  makeCharts();
  const isLive = page.dataset.live === "yes";
  if (isLive) setInterval(watchHost, 1000);
  while (!await firstLook()) await new Promise((done) => setTimeout(done, 3000));
  page.dataset.ready = "yes";  // state and history are on the page
  if (state.end_version) showView("given");
  if (isLive) listen();
}
start();
