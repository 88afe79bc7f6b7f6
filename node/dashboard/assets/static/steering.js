"use strict";
// The organiser's revisions of the manifest, the newest first. The server writes the same list, with times in UTC.

function showSteering(revisions) {
  $("steering").hidden = !revisions.length;
  $("revisions").replaceChildren(...[...revisions].reverse().map((revision) => {
    const line = make("li"), when = new Date(1000 * revision.time).toISOString().slice(0, 16).replace("T", " ");
    line.append(make("time", "", when), make("span", "", revision.text));
    return line;
  }));
}
