"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const { items, sizes: S } = data;
const stage = document.getElementById("stage"), panel = document.getElementById("panel");
const hover = document.getElementById("hover"), found = document.getElementById("found");
const opened = new Set(data.open);
let view = { x: 0, y: 0, k: 1 }, selected = null, hits = new Set(), centres = new Map(), total = { w: 1, h: 1 };
const text = value => String(value).replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
const n = value => Math.round(value * 10) / 10;
const isOpen = id => opened.has(id) && items[id].kids;

// The same placing as cpt_fx/inspection/layout.py: rows and orders are given, sizes change with what is open.
function settle(row, wanted, width, x) {
  let offset = 0;
  const offsets = row.map((id, i) => i ? offset += (width.get(row[i - 1]) + width.get(id)) / 2 + S.gapX : 0);
  const pools = [];
  wanted.forEach((want, i) => {
    let mean = want - offsets[i], weight = row[i].includes("~") ? 0.1 : 1, count = 1;
    while (pools.length && pools[pools.length - 1][0] > mean) {
      const [other, others, members] = pools.pop();
      mean = (mean * weight + other * others) / (weight + others);
      weight += others;
      count += members;
    }
    pools.push([mean, weight, count]);
  });
  let at = 0;
  for (const [mean, , count] of pools) for (let i = 0; i < count; i++, at++) x.set(row[at], mean + offsets[at]);
}

function straighten(plan, width, x) {
  const lanes = new Map(), room = new Map();
  for (const row of plan.rows) row.forEach((id, i) => {
    if (!id.includes("~")) return;
    const source = id.slice(0, id.lastIndexOf("~"));
    lanes.has(source) ? lanes.get(source).push(id) : lanes.set(source, [id]);
    room.set(id, [row[i - 1], row[i + 1]]);
  });
  const align = (line, low, high) => {
    if (!line.length || low > high) return;
    const middle = Math.min(Math.max(line.reduce((sum, id) => sum + x.get(id), 0) / line.length, low), high);
    for (const id of line) x.set(id, middle);
  };
  for (const chain of [...lanes.values(), ...lanes.values()]) {
    let line = [], low = -Infinity, high = Infinity;
    for (const id of chain) {
      const [before, after] = room.get(id);
      const least = before === undefined ? -Infinity : x.get(before) + (width.get(before) + S.lane) / 2 + S.tight;
      const most = after === undefined ? Infinity : x.get(after) - (width.get(after) + S.lane) / 2 - S.tight;
      if (Math.max(low, least) > Math.min(high, most)) { align(line, low, high); line = []; low = -Infinity; high = Infinity; }
      line.push(id);
      low = Math.max(low, least);
      high = Math.min(high, most);
    }
    align(line, low, high);
  }
}

function place(plan, boxes) {
  const width = new Map(), rowOf = new Map(), x = new Map(), above = new Map(), below = new Map(), seen = new Set();
  plan.rows.forEach((row, r) => row.forEach(id => { width.set(id, boxes.has(id) ? boxes.get(id).w : S.lane); rowOf.set(id, r); }));
  const add = (map, key, value) => map.has(key) ? map.get(key).push(value) : map.set(key, [value]);
  const straight = id => { const [a, b] = boxes.get(id)?.port ?? [0, 0]; return Math.abs(a - b) < 6 ? a : 0; };
  for (const chain of plan.chains) for (let i = 1; i < chain.length; i++) {
    const a = chain[i - 1], b = chain[i], key = a + "\n" + b;
    if (seen.has(key)) continue;
    seen.add(key);
    const shift = straight(a) - straight(b), weight = [8, 0.05, 4][a.includes("~") + b.includes("~")];
    add(above, b, [a, shift, weight]);
    add(below, a, [b, -shift, weight]);
  }
  for (const row of plan.rows) settle(row, row.map(() => 0), width, x);
  for (let sweep = 0; sweep < S.sweeps; sweep++) {
    const down = sweep % 2 === 0;
    for (const row of down ? plan.rows : [...plan.rows].reverse()) {
      settle(row, row.map(id => {
        let near = (down ? above : below).get(id) || [];
        if (sweep > 5 || !near.length) near = [...(above.get(id) || []), ...(below.get(id) || [])];
        if (!near.length) return x.get(id);
        let sum = 0, all = 0;
        for (const [other, shift, weight] of near) { sum += (x.get(other) + shift) * weight; all += weight; }
        return sum / all;
      }), width, x);
    }
  }
  straighten(plan, width, x);
  let left = Infinity, right = -Infinity;
  for (const [id, value] of x) { left = Math.min(left, value - width.get(id) / 2); right = Math.max(right, value + width.get(id) / 2); }
  if (!x.size) left = right = 0;
  for (const [id, value] of x) x.set(id, value - left);
  const top = new Map(), rowTop = [], rowHeight = [];
  let y = 0, gap = 0;
  plan.rows.forEach((row, r) => {
    const height = Math.max(0, ...row.map(id => boxes.get(id)?.h ?? 0));
    y += height && r ? gap : Math.min(gap, S.portY);
    rowTop.push(y);
    rowHeight.push(height);
    for (const id of row) top.set(id, y + (height - (boxes.get(id)?.h ?? height)) / 2);
    y += height;
    gap = height ? S.gapY : S.portY;
  });
  return { x, top, rowOf, rowTop, rowHeight, width: right - left, height: y };
}

function edge(chain, p, boxes, chains, drawn) {
  const first = chain[0], last = chain[chain.length - 1], port = (id, side) => boxes.get(id)?.port?.[side] ?? 0;
  let x = p.x.get(first) + port(first, 1), y = p.top.get(first) + (boxes.get(first)?.h ?? 0), start = 1;
  for (; drawn.has(chain[start - 1] + "\n" + chain[start]); start++) {
    const r = p.rowOf.get(chain[start]);
    x = p.x.get(chain[start]);
    y = p.rowTop[r] + p.rowHeight[r];
  }
  chain.forEach((id, i) => i && drawn.add(chain[i - 1] + "\n" + id));
  let path = `M${n(x)} ${n(y)}`;
  for (const id of chain.slice(start)) {
    const r = p.rowOf.get(id), bottom = p.rowTop[r - 1] + p.rowHeight[r - 1], top = p.rowTop[r];
    let to = p.x.get(id) + (id === last ? port(id, 0) : 0);
    if (id === last && boxes.has(id) && !isOpen(id)) {
      const arriving = chains.get(last);
      to += (arriving.indexOf(chain) - (arriving.length - 1) / 2) * Math.min(16, boxes.get(last).w * 0.7 / arriving.length);
    }
    if (Math.abs(to - x) < 0.05) path += `V${n(top)}`;
    else path += `V${n(bottom)}C${n(x)} ${n((bottom + top) / 2)} ${n(to)} ${n((bottom + top) / 2)} ${n(to)} ${n(top)}`;
    x = to;
  }
  if (!boxes.has(last)) return `<path class="edge" d="${path}"/>`;
  const end = p.top.get(last) - 1;
  return `<path class="edge" d="${path}V${n(end)}"/><path class="tip" d="M${n(x)} ${n(end)}l-3.5 -6h7z"/>`;
}

function back([a, b], p, boxes) {
  if (!boxes.has(a) || !boxes.has(b)) return "";
  const ax = n(p.x.get(a) + boxes.get(a).w / 2), ay = n(p.top.get(a) + boxes.get(a).h / 2);
  const bx = n(p.x.get(b) + boxes.get(b).w / 2 + 1), by = n(p.top.get(b) + boxes.get(b).h / 2), far = n(p.width + S.back);
  return `<path class="edge back" d="M${ax} ${ay}C${far} ${ay} ${far} ${by} ${bx} ${by}"/><path class="tip" d="M${bx} ${by}l6 -3.5v7z"/>`;
}

function inside(item) {
  const boxes = new Map(item.kids.map(id => [id, box(id)]));
  const p = place(item, boxes), chains = new Map();
  for (const chain of item.chains) {
    const last = chain[chain.length - 1];
    chains.has(last) ? chains.get(last).push(chain) : chains.set(last, [chain]);
  }
  for (const group of chains.values()) group.sort((a, b) => p.x.get(a[a.length - 2]) - p.x.get(b[b.length - 2]));
  const drawn = new Set();
  let markup = item.chains.map(chain => edge(chain, p, boxes, chains, drawn)).join("") + item.back.map(pair => back(pair, p, boxes)).join("");
  const spots = [];
  for (const [id, b] of boxes) {
    const x = p.x.get(id) - b.w / 2, y = p.top.get(id), open = isOpen(id);
    spots.push({ id, x, y, w: b.w, h: b.h, inner: b.spots });
    const name = `${items[id].l}${items[id].kids ? (open ? ", open" : ", folded") : ""}`;
    markup += `<g class="${open ? "frame" : items[id].c}" data-id="${text(id)}" tabindex="0" role="button" ` +
      `${items[id].kids ? `aria-expanded="${!!open}" ` : ""}aria-label="${text(name)}" transform="translate(${n(x)} ${n(y)})">${b.m}</g>`;
  }
  return { markup, p, spots, width: p.width + (item.back.length ? S.back : 0) };
}

function box(id) {
  const item = items[id];
  if (!isOpen(id)) return { w: item.w, h: item.h, m: item.m };
  const { markup, p, spots, width: wide } = inside(item);
  const entered = p.x.has("in"), left = p.x.has("out");
  const enter = p.x.get("in") ?? wide / 2, leave = p.x.get("out") ?? wide / 2;
  const shift = entered ? Math.max(S.pad, item.tw - enter) : S.pad;
  const w = Math.max(2 * shift + wide, item.tw + S.pad), first = S.bar + (entered ? 0 : S.pad / 2);
  const h = first + p.height + (left ? 0 : S.pad);
  const frame = item.frame.replace('width="0" height="0"', `width="${n(w)}" height="${n(h)}"`);
  const lead = entered ? `<path class="edge" d="M${n(shift + enter)} 0V${n(first)}"/>` : "";
  return { w, h, port: [shift + enter - w / 2, shift + leave - w / 2], spots: { shift, first, spots },
    m: `${frame}<rect class="bar" width="${n(w)}" height="${S.bar}"/>${lead}<g transform="translate(${n(shift)} ${n(first)})">${markup}</g>` };
}

function note(spots, x, y) {
  for (const s of spots) {
    centres.set(s.id, { x: x + s.x + s.w / 2, y: y + s.y + (s.inner ? 14 : s.h / 2), top: y + s.y });
    if (s.inner) note(s.inner.spots, x + s.x + s.inner.shift, y + s.y + s.inner.first);
  }
}

function draw() {
  const { markup, p, spots, width } = inside(items[data.root]);
  centres = new Map();
  note(spots, 0, 0);
  total = { w: width, h: p.height };
  stage.innerHTML = `<svg class="graph" xmlns="http://www.w3.org/2000/svg" role="group" aria-label="Rewritten graph"><g id="world">${markup}</g></svg>`;
  mark();
  move();
}

function mark() {
  stage.classList.toggle("searching", hits.size > 0);
  for (const node of stage.querySelectorAll("[data-id]")) {
    node.classList.toggle("selected", node.dataset.id === selected);
    node.classList.toggle("hit", hits.has(node.dataset.id));
  }
}

function move() {
  document.getElementById("world").setAttribute("transform", `translate(${n(view.x)} ${n(view.y)}) scale(${view.k.toFixed(4)})`);
}

function fit(whole) {
  const { clientWidth: w, clientHeight: h } = stage;
  const k = Math.min((w - 48) / total.w, (h - 48) / total.h, 1.15);
  view.k = whole ? k : Math.max(k, Math.min(0.85, (w - 48) / total.w));
  view.x = (w - total.w * view.k) / 2;
  view.y = Math.max(24, (h - total.h * view.k) / 2);
  move();
}

function zoom(factor, x = stage.clientWidth / 2, y = stage.clientHeight / 2) {
  const k = Math.min(3, Math.max(0.02, view.k * factor));
  view = { k, x: x - (x - view.x) * k / view.k, y: y - (y - view.y) * k / view.k };
  move();
}

function show(id) {
  selected = id;
  mark();
  const item = items[id ?? data.root], role = (item.c.match(/weight|activation|bias|gradient/) || [""])[0];
  const rows = item.f.map(([key, value]) => `<dt>${text(key)}</dt><dd>${text(value)}</dd>`).join("");
  const kind = role ? `${role} quantizer` : item.c.includes("module") ? "module" : item.f[0][1];
  panel.innerHTML = id === null
    ? `<h3>${text(document.title.split(" – ")[0])}</h3><p>Click a box for its bits, range, levels and error. Click a module to open it, its title to fold it.</p><dl>${rows}</dl>`
    : `<h3>${text(item.t)}</h3><span class="tag ${role}">${text(kind)}</span><dl>${rows}</dl>`;
}

function toggle(id) {
  const before = centres.get(id);
  opened.has(id) ? opened.delete(id) : opened.add(id);
  draw();
  const after = centres.get(id);
  if (before && after) { view.x += (before.x - after.x) * view.k; view.y += (before.top - after.top) * view.k; move(); }
}

function activate(id) {
  show(id);
  if (items[id].kids) toggle(id);
  stage.querySelector(`[data-id="${CSS.escape(id)}"]`)?.focus({ preventScroll: true });
}

function reveal(id) {
  for (let up = items[id].p; up; up = items[up].p) opened.add(up);
  draw();
  const c = centres.get(id);
  view.k = Math.max(view.k, 0.8);
  view.x = stage.clientWidth / 2 - c.x * view.k;
  view.y = stage.clientHeight / 2 - c.y * view.k;
  move();
}

const idAt = event => event.target.closest?.("[data-id]")?.dataset.id;
let drag = null, quiet = false;
stage.addEventListener("pointerdown", event => { drag = { x: event.clientX, y: event.clientY, from: { ...view }, moved: false, id: event.pointerId }; });
addEventListener("pointermove", event => {
  if (!drag) return;
  const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
  if (!drag.moved && Math.hypot(dx, dy) > 4) { drag.moved = true; stage.setPointerCapture(drag.id); hover.hidden = true; }
  if (drag.moved) { view.x = drag.from.x + dx; view.y = drag.from.y + dy; move(); }
});
addEventListener("pointerup", () => { if (drag?.moved) addEventListener("click", e => e.stopPropagation(), { capture: true, once: true }); setTimeout(() => { drag = null; }); });
addEventListener("pointercancel", () => { drag = null; });
stage.addEventListener("click", event => {
  const id = idAt(event);
  hover.hidden = quiet = true;
  if (!id) return show(null);
  const inFrame = event.target.closest("[data-id]").classList.contains("frame");
  if (inFrame && !event.target.closest(".bar, .fold, text")) return show(id);
  activate(id);
});
stage.addEventListener("wheel", event => {
  event.preventDefault();
  const r = stage.getBoundingClientRect();
  zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX - r.left, event.clientY - r.top);
}, { passive: false });
stage.addEventListener("pointerover", event => {
  const id = idAt(event);
  if (!id || quiet || drag?.moved || isOpen(id)) { hover.hidden = true; return; }
  const item = items[id];
  hover.innerHTML = `<b>${text(item.t)}</b>${item.f.slice(0, 10).map(([k, v]) => `${text(k)}: ${text(v)}`).join("<br>")}`;
  hover.hidden = false;
  beside(event);
});
// Below and to the right of the pointer, on its other side where there is no room: always inside, never under it.
function beside(event) {
  const spot = (at, size, room) => Math.max(8, at + 14 + size + 8 <= room ? at + 14 : Math.min(at - 14, room - 8) - size);
  hover.style.left = hover.style.top = "0";
  hover.style.left = `${spot(event.clientX, hover.offsetWidth, innerWidth)}px`;
  hover.style.top = `${spot(event.clientY, hover.offsetHeight, innerHeight)}px`;
}
stage.addEventListener("pointermove", event => {
  // What a click has opened or shown in the panel stays free until the pointer goes to another box.
  if (event.movementX || event.movementY) quiet = false;
  if (!hover.hidden) beside(event);
});
stage.addEventListener("pointerleave", () => { hover.hidden = true; });

const search = document.getElementById("search");
search.addEventListener("input", () => {
  const words = search.value.trim().toLowerCase();
  const matching = words ? Object.keys(items).filter(id => `${items[id].t} ${items[id].l}`.toLowerCase().includes(words) && items[id].p) : [];
  found.textContent = words ? `${matching.length} found${matching.length ? ", Enter shows the next" : ""}` : "";
  search.matching = matching;
  search.at = -1;
  hits = new Set(matching);
  // What is hidden in a folded module shows as the module.
  for (const id of matching) for (let up = items[id].p; up; up = items[up].p) if (!isOpen(up)) hits.add(up);
  mark();
});
search.addEventListener("keydown", event => {
  if (event.key === "Escape") { search.value = ""; search.dispatchEvent(new Event("input")); search.blur(); }
  if (event.key !== "Enter" || !search.matching?.length) return;
  search.at = (search.at + (event.shiftKey ? search.matching.length - 1 : 1)) % search.matching.length;
  reveal(search.matching[search.at]);
  show(search.matching[search.at]);
  found.textContent = `${search.at + 1} of ${search.matching.length}`;
});
addEventListener("keydown", event => {
  if (event.target === search || event.ctrlKey || event.metaKey || event.altKey) return;
  const inStage = stage.contains(event.target) || event.target === document.body;
  const id = event.target.dataset?.id;
  if (event.key === "/") { event.preventDefault(); search.focus(); }
  else if (event.key === "Escape") show(null);
  else if (!inStage) return;
  else if ((event.key === "Enter" || event.key === " ") && id) { event.preventDefault(); activate(id); }
  else if (event.key === "+" || event.key === "=") zoom(1.25);
  else if (event.key === "-") zoom(0.8);
  else if (event.key === "0") fit(true);
  else if (event.key.startsWith("Arrow") && stage.contains(event.target)) {
    event.preventDefault();
    const step = { ArrowUp: [0, 60], ArrowDown: [0, -60], ArrowLeft: [60, 0], ArrowRight: [-60, 0] }[event.key];
    view.x += step[0]; view.y += step[1]; move();
  }
});
stage.addEventListener("focusin", event => {
  const id = idAt(event), c = id && centres.get(id);
  if (!c || !event.target.matches(":focus-visible")) return;
  const x = view.x + c.x * view.k, y = view.y + c.y * view.k;
  if (x < 0 || y < 0 || x > stage.clientWidth || y > stage.clientHeight) {
    view.x += stage.clientWidth / 2 - x; view.y += stage.clientHeight / 2 - y; move();
  }
});
document.getElementById("fold").addEventListener("click", () => { opened.clear(); opened.add(data.root); draw(); fit(); });
document.getElementById("unfold").addEventListener("click", () => {
  const next = [...centres.keys()].filter(id => items[id].kids && !isOpen(id));
  next.forEach(id => opened.add(id));
  draw();
  fit();
});
document.getElementById("larger").addEventListener("click", () => zoom(1.25));
document.getElementById("smaller").addEventListener("click", () => zoom(0.8));
document.getElementById("fit").addEventListener("click", () => fit(true));
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, now = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});
addEventListener("resize", () => move());
draw();
fit();
show(null);
})();
