"use strict";
// Elements of the page. Text from peers is inserted as text, never as HTML.

const $ = (id) => document.getElementById(id);

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
function later(work, pause) {
  // Returns a function that does the work once, `pause` ms after the first of several calls.
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => { waiting = false; work(); }, pause);
  };
}
