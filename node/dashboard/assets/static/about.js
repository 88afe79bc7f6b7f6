"use strict";
// The organiser's facts about the run, which a revision of the manifest may change. The server writes the same.

function entry(term, content) {
  const box = make("div"), value = make("dd");
  value.append(content);
  box.append(make("dt", "", term), value);
  return box;
}
function showAbout(about) {
  const facts = [["Data", about.data || about.source], ["Organiser", about.organiser], ["Licence", about.licence]];
  const entries = facts.filter(([, text]) => text).map(([term, text]) => entry(term, text));
  if (/^https?:\/\//.test(about.url)) {
    const link = make("a", "", about.url);
    link.href = about.url;
    link.rel = "noopener noreferrer";
    entries.push(entry("More", link));
  }
  const list = make("dl", "about");
  list.append(...entries);
  const text = about.description ? [make("p", "description", about.description)] : [];
  $("about").replaceChildren(...text, ...(entries.length ? [list] : []));
}
