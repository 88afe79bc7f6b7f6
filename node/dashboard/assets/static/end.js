"use strict";
// The end screen. The server renders it with all text escaped; this script exchanges the section when it has changed.

let endRequested = false;

async function fetchEnd() {
  const answer = await fetch("/");
  if (!answer.ok) return;
  const section = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("end");
  if (section) $("end").replaceWith(document.adoptNode(section));
}
async function showEnd() {
  const version = state.end_version ? `${state.end_version}/${state.model ? state.model.round : ""}` : "";
  page.dataset.over = version ? "yes" : "no";
  if ($("end").dataset.version === version || endRequested) return;
  endRequested = true;
  try {
    await fetchEnd();
  } catch {
    // no answer: `watchHost` shows it, and the next message tries again
  } finally {
    endRequested = false;
  }
}
