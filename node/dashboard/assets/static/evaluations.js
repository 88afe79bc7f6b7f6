"use strict";
// The results of `murmur eval`: the newest of each metric, and its course. The server writes the same table.

function showEvaluations(results) {
  $("evaluations").hidden = !results.length;
  $("results").replaceChildren(...results.map((row) => {
    const line = make("tr"), place = make("td"), digits = (number) => number == null ? "" : number.toFixed(4);
    const course = draw("svg", { class: "course", viewBox: "-2 -2 104 24", "aria-hidden": "true" });
    if (row.points) course.append(draw("polyline", { points: row.points }));
    place.append(course);
    line.append(make("td", "", row.task), make("td", "", row.metric), make("td", "n", digits(row.value)),
      make("td", "n", digits(row.standard_error)), make("td", "n", row.first === row.value ? "" : digits(row.first)), place,
      make("td", "n", row.round == null ? "" : row.round));
    return line;
  }));
}
