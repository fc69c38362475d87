"""The page of ``minigpt explain attention``: choose a head, point at a character, and see what it reads.

All that it shows it takes from the JSON in it, by its own script; no number is computed there but percentages.
"""

from __future__ import annotations

from minigpt.cli.explain import shades
from minigpt.cli.save import Page
from minigpt.errors import PromptError

# Its weights grow with the square of the text, and its text has to fit on a screen beside them.
MOST_CHARS = 300

_BODY = """
<p>Each character of a text reads itself and those before it, never a later one. Point at a character, tap it or walk
there with the arrow keys: the characters that it reads light up, and the numbers say how much it reads of each.
Beside them stands the uniform average, which reads all alike.</p>
<p class="controls"><label>Layer <select id="layer"></select></label> <label>Head <select id="head"></select></label>
<span id="summary"></span></p>
<div class="parts">
<section>
<div id="text" role="listbox" aria-label="The text, a character each"></div>
<p id="scale" aria-hidden="true"></p>
<h2 id="heading" aria-live="polite"></h2>
<div class="scroll"><table id="reads"><thead><tr><th scope="col">position</th><th scope="col">character</th>
<th scope="col">weight</th><th scope="col">share</th><th scope="col">uniform</th><th></th></tr></thead>
<tbody></tbody></table></div>
</section>
<section>
<h2>The head, row by row</h2>
<canvas id="map" role="img" aria-label="Heat map: a row is a character that reads, a column one that is read"></canvas>
<p id="cell">A row is a character that reads, a column one that is read. Point at a cell.</p>
<h2>All heads, with their mean entropy in bits</h2>
<div id="maps" role="group" aria-label="All heads"></div>
</section>
</div>
<noscript><p>This page needs JavaScript to show the weights, which are in it as JSON.</p></noscript>
"""

_STYLE = """
h2 { font-size: 1rem; }
select { font: inherit; padding: 0.2rem 0.4rem; }
.controls { display: flex; flex-wrap: wrap; gap: 0.6rem 1.2rem; align-items: center; }
#maps { display: grid; gap: 0.4rem; justify-content: start; overflow-x: auto; }
#maps button { font: 0.7rem/1.3 system-ui, sans-serif; color: inherit; background: none; border: 2px solid var(--faint);
  border-radius: 4px; padding: 0.2rem; cursor: pointer; }
#maps button[aria-pressed=true] { border-color: var(--ink); font-weight: bold; }
#maps canvas { display: block; width: 4.5rem; height: 4.5rem; image-rendering: pixelated; margin: 0 auto 0.1rem; }
#scale span { padding: 0.1rem 0.6rem; font-size: 0.85rem; }
#text { font: 1.25rem/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0;
  border: 1px solid var(--faint); border-radius: 4px; padding: 0.6rem; }
#text span { cursor: pointer; padding: 0.15rem 0; border-bottom: 3px solid transparent; }
#text .sign:not(.read) { opacity: 0.55; }
#text .current { border-bottom-color: #D55E00; font-weight: bold; }
#text span:focus-visible { outline: 3px solid #D55E00; outline-offset: 1px; }
.parts { display: grid; gap: 1rem 3rem; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 60rem) { .parts { grid-template-columns: minmax(0, 1fr) minmax(0, 30rem); } }
.scroll { max-height: 30rem; overflow: auto; }
#reads { font-variant-numeric: tabular-nums; }
#reads td:nth-child(2) { text-align: center; font-family: ui-monospace, monospace; }
#reads td { white-space: nowrap; }
#reads td:last-child { min-width: 5rem; width: 8rem; padding: 0; }
@media (max-width: 76rem) { #reads td, #reads th { padding: 0.15rem 0.3rem; font-size: 0.85rem; } }
#reads th { position: sticky; top: 0; background: var(--paper); }
.bar { height: 0.8rem; background: #0072B2; min-width: 1px; }
#map { width: min(100%, 26rem); touch-action: manipulation; cursor: crosshair; }
@media (prefers-color-scheme: dark) { .bar { background: #56B4E9; } }
"""

_SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const STOPS = %STOPS%;
// Code points, as the model counts characters.
const chars = Array.from(data.prompt);
const T = chars.length;
const byId = id => document.getElementById(id);
// More characters than these beside the large map would run into each other.
const ROOM = T <= 48 ? 1 : 0;
const state = {head: data.heads[0], position: T - 1};

// The root makes small weights seen.
function colour(weight) {
  const place = Math.sqrt(Math.min(Math.max(weight, 0), 1)) * (STOPS.length - 1);
  const left = Math.min(Math.floor(place), STOPS.length - 2);
  return STOPS[left].map((part, i) => Math.round(part + (STOPS[left + 1][i] - part) * (place - left)));
}
const css = parts => `rgb(${parts.join(",")})`;
const ink = ([red, green, blue]) => 0.299 * red + 0.587 * green + 0.114 * blue > 118 ? "#000000" : "#ffffff";
const first = i => i + 1 - data.readable[i];
const signs = {"\\n": "\\u21b5", "\\t": "\\u2192", " ": "\\u2423"};
// The last ones have no picture, or join the character before them.
const sign = char => signs[char] || (/[\\p{C}\\p{M}\\p{Z}]/u.test(char) ? "\\ufffd" : char);
const name = i => `position ${i} (${sign(chars[i])})`;

// Draws a head in cells of some pixels, with so many cells of room for characters at the left and above.
function drawn(canvas, head, size, room) {
  canvas.width = canvas.height = (T + room) * size;
  const pen = canvas.getContext("2d");
  pen.font = `${Math.round(size * 0.7)}px monospace`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillStyle = getComputedStyle(document.body).color;
  if (room) chars.forEach((char, i) => {
    pen.fillText(sign(char), (i + 1.5) * size, size / 2);
    pen.fillText(sign(char), size / 2, (i + 1.5) * size);
  });
  pen.translate(room * size, room * size);
  for (let i = 0; i < T; i++) for (let j = first(i); j <= i; j++) {
    pen.fillStyle = css(colour(head.weights[i][j]));
    pen.fillRect(j * size, i * size, size, size);
  }
  return pen;
}

const layers = [...new Set(data.heads.map(head => head.layer))];
const numbers = [...new Set(data.heads.map(head => head.head))];
for (const [id, values] of [["layer", layers], ["head", numbers]]) {
  for (const value of values) byId(id).add(new Option(value, value));
  byId(id).addEventListener("change", () => {
    const wanted = head => head.layer === Number(byId("layer").value) && head.head === Number(byId("head").value);
    choose(data.heads.find(wanted));
  });
}
byId("maps").style.gridTemplateColumns = `repeat(${numbers.length}, max-content)`;
const buttons = data.heads.map(head => {
  const button = document.createElement("button");
  button.type = "button";
  const canvas = document.createElement("canvas");
  canvas.setAttribute("aria-hidden", "true");
  drawn(canvas, head, 1, 0);
  button.append(canvas, `L${head.layer} H${head.head}: ${head.mean_entropy.toFixed(2)}`);
  button.title = `layer ${head.layer}, head ${head.head}: mean entropy ${head.mean_entropy.toFixed(2)} bits`;
  button.addEventListener("click", () => choose(head));
  byId("maps").append(button);
  return button;
});
byId("scale").append("weight ", ...[0, 0.04, 0.16, 0.36, 0.64, 1].map(weight => {
  const patch = document.createElement("span");
  patch.textContent = weight;
  patch.style.background = css(colour(weight));
  patch.style.color = ink(colour(weight));
  return patch;
}));

// One stop for the tabulator; the arrow keys walk.
const spans = chars.map((char, i) => {
  const span = document.createElement("span");
  span.textContent = char === "\\n" || char === "\\t" ? sign(char) : char;
  if (char === "\\n" || char === "\\t") span.classList.add("sign");
  span.dataset.position = i;
  span.setAttribute("role", "option");
  span.setAttribute("aria-label", name(i));
  for (const event of ["mouseenter", "focus", "click"]) span.addEventListener(event, () => read(i));
  byId("text").append(span);
  if (char === "\\n") byId("text").append("\\n");
  return span;
});
byId("text").addEventListener("keydown", event => {
  const to = {ArrowLeft: state.position - 1, ArrowRight: state.position + 1, Home: 0, End: T - 1}[event.key];
  if (to === undefined) return;
  event.preventDefault();
  if (to >= 0 && to < T) spans[to].focus();
});

function choose(head) {
  state.head = head;
  byId("layer").value = head.layer;
  byId("head").value = head.head;
  buttons.forEach((button, i) => button.setAttribute("aria-pressed", data.heads[i] === head));
  byId("summary").textContent = `mean entropy ${head.mean_entropy.toFixed(2)} bits, `
    + `${head.mean_departure.toFixed(2)} below the uniform average; reads ${head.mean_distance.toFixed(2)} `
    + `characters back in the mean (uniform ${data.uniform.mean_distance.toFixed(2)})`;
  read(state.position);
}

function read(position) {
  state.position = position;
  const row = state.head.weights[position], n = data.readable[position], start = first(position);
  const uniform = data.uniform.weight[position];
  spans.forEach((span, j) => {
    const readable = j >= start && j <= position;
    span.classList.toggle("read", readable);
    span.classList.toggle("current", j === position);
    span.style.background = readable ? css(colour(row[j])) : "";
    span.style.color = readable ? ink(colour(row[j])) : "";
    span.title = readable ? `${row[j].toFixed(4)}` : "";
    span.setAttribute("aria-selected", j === position);
    span.tabIndex = j === position ? 0 : -1;
  });
  const bits = state.head.entropy[position].toFixed(2), most = data.uniform.entropy[position].toFixed(2);
  byId("heading").textContent =
    `${name(position)} reads ${n} character${n === 1 ? "" : "s"}: ${bits} bits, the uniform average ${most}`;
  const order = Array.from({length: n}, (_, k) => start + k).sort((a, b) => row[b] - row[a] || b - a);
  byId("reads").tBodies[0].replaceChildren(...order.map(j => {
    const line = document.createElement("tr");
    line.dataset.position = j;
    line.dataset.weight = row[j];
    for (const text of [j, sign(chars[j]), row[j].toFixed(4), `${(100 * row[j]).toFixed(1)} %`, uniform.toFixed(4)])
      line.insertCell().textContent = text;
    const bar = document.createElement("div");
    bar.className = "bar";
    bar.style.width = `${100 * row[j]}%`;
    line.insertCell().append(bar);
    return line;
  }));
  const size = Math.round(900 / (T + ROOM)), pen = drawn(byId("map"), state.head, size, ROOM);
  pen.strokeStyle = "#D55E00";
  pen.lineWidth = 4;
  pen.strokeRect(start * size, position * size, n * size, size);
}

// The cell of the large map under a pointer: row and column, from 0.
const cell = event => {
  const frame = byId("map").getBoundingClientRect();
  const part = (at, start, length) =>
    Math.min(T - 1, Math.max(0, Math.floor((at - start) / length * (T + ROOM)) - ROOM));
  return [part(event.clientY, frame.top, frame.height), part(event.clientX, frame.left, frame.width)];
};
for (const kind of ["mousemove", "click"]) byId("map").addEventListener(kind, event => {
  const [i, j] = cell(event), readable = j >= first(i) && j <= i;
  byId("cell").textContent = readable
    ? `${name(i)} reads ${state.head.weights[i][j].toFixed(4)} of ${name(j)}.`
    : `${name(i)} may not read ${name(j)}, which is ${j > i ? "later" : "older than the window"}.`;
  if (i !== state.position) read(i);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => read(state.position));
choose(state.head);
"""

PAGE = Page(_BODY, _STYLE, _SCRIPT.replace("%STOPS%", str([list(shades.colour(i / 4)) for i in range(5)])))


def check_length(text: str) -> None:
    """Refuses a text that no page could show.

    Raises:
        PromptError: it is too long.
    """
    if len(text) > MOST_CHARS:
        raise PromptError(
            f"the prompt has {len(text):,} characters, and a page can show at most {MOST_CHARS}: give a part of it"
        )
