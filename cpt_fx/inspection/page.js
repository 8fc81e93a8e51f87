"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const { items, sizes: S } = data;
const stage = document.getElementById("stage"), panel = document.getElementById("panel"), found = document.getElementById("found");
const opened = new Set(data.open);
let scale = 1, selected = null, hits = new Set(), total = { w: 1, h: 1 };
const text = value => String(value).replace(/[&<>"]/g, c => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));
const n = value => Math.round(value * 10) / 10;
const isOpen = id => opened.has(id) && items[id].kids;

// Boxes stand as cpt_fx/inspection/layout.py placed them folded. Opened ones push the columns apart, half to each side:
// what stands in a line, or nearly, stays in it.
function apart(plan, boxes, half) {
  const from = Object.values(plan.x).sort((a, b) => a - b).reduce((all, x) => x - all[all.length - 1] < 24 ? all : [...all, x], []);
  const column = id => from.filter(x => x <= plan.x[id]).length - 1, last = from.length - 1;
  const straight = ([enter, leave] = [0, 0]) => Math.abs(enter - leave) < 6 ? enter : 0;
  const aside = id => plan.x[id] - from[column(id)] - straight(boxes.get(id)?.port);
  const pairs = plan.rows.flatMap(row => row.slice(1).map((b, i) => {
    const a = row[i], gap = (a + b).includes("..") ? S.tight : S.gapX;
    return [column(a), column(b), half(a) + half(b) + gap + aside(a) - aside(b)];
  }));
  const pushed = (from, pairs) => from.reduce((to, x, k) => {
    const least = pairs.filter(([a, b]) => a < b && b === k).map(([a, , distance]) => to[a] + distance);
    return [...to, Math.max(k ? to[k - 1] + x - from[k - 1] : 0, ...least)];
  }, []);
  const right = pushed(from, pairs);
  const left = pushed(from.map(x => -x).reverse(), pairs.map(([a, b, distance]) => [last - b, last - a, distance]));
  return id => { const k = column(id); return (right[k] + right[last] - left[last - k]) / 2 + aside(id); };
}

function place(plan, boxes) {
  const half = id => (boxes.get(id)?.w ?? S.lane) / 2, to = apart(plan, boxes, half), ids = plan.rows.flat();
  const left = Math.min(...ids.map(id => to(id) - half(id))), right = Math.max(left, ...ids.map(id => to(id) + half(id)));
  const rows = [], rowOf = {}, top = {};
  let y = 0, gap = 0;
  for (const row of plan.rows) {
    const height = Math.max(0, ...row.map(id => boxes.get(id)?.h ?? 0));
    y += height && rows.length ? gap : Math.min(gap, S.portY);
    for (const id of row) {
      rowOf[id] = rows.length;
      top[id] = y + (height - (boxes.get(id)?.h ?? height)) / 2;
    }
    rows.push({ top: y, bottom: y += height });
    gap = height ? S.gapY : S.portY;
  }
  return { x: Object.fromEntries(ids.map(id => [id, to(id) - left])), top, rowOf, rows, width: right - left || 0, height: y };
}

function edge(chain, aside, p, boxes) {
  const first = chain[0], last = chain[chain.length - 1], from = boxes.get(first), to = boxes.get(last);
  let r = p.rowOf[first], x = p.x[first] + (from?.port?.[1] ?? 0);
  let path = `M${n(x)} ${n(first.includes("..") ? p.rows[r].bottom : p.top[first] + (from?.h ?? 0))}`;
  for (const id of chain.slice(1)) {
    const { bottom } = p.rows[r], { top } = p.rows[++r], middle = n((bottom + top) / 2);
    const next = p.x[id] + (id === last ? to?.port?.[0] ?? aside : 0);
    path += Math.abs(next - x) < 0.05 ? `V${n(top)}` : `V${n(bottom)}C${n(x)} ${middle} ${n(next)} ${middle} ${n(next)} ${n(top)}`;
    x = next;
  }
  if (!to) return `<path class="edge" d="${path}"/>`;
  const end = n(p.top[last] - 1);
  return `<path class="edge" d="${path}V${end}"/><path class="tip" d="M${n(x)} ${end}l-3.5 -6h7z"/>`;
}

function back([a, b], p, boxes) {
  const y = id => n(p.top[id] + boxes.get(id).h / 2), x = id => p.x[id] + boxes.get(id).w / 2;
  const bx = n(x(b) + 1), far = n(p.width + S.back);
  return `<path class="edge back" d="M${n(x(a))} ${y(a)}C${far} ${y(a)} ${far} ${y(b)} ${bx} ${y(b)}"/><path class="tip" d="M${bx} ${y(b)}l6 -3.5v7z"/>`;
}

function inside(item) {
  const boxes = new Map(item.kids.map(id => [id, box(id)])), p = place(item, boxes);
  let markup = item.chains.map((chain, i) => edge(chain, item.asides[i], p, boxes)).join("");
  markup += item.back.map(pair => back(pair, p, boxes)).join("");
  for (const [id, b] of boxes) {
    const { t, f, l, c, kids } = items[id], open = isOpen(id);
    const told = open ? t : [t, ...f.slice(0, 10).map(fact => fact.join(": "))].join("\n");
    markup += `<g class="${open ? "frame" : c}" data-id="${text(id)}" tabindex="0" role="button" ` +
      `${kids ? `aria-expanded="${!!open}" ` : ""}aria-label="${text(l)}" ` +
      `transform="translate(${n(p.x[id] - b.w / 2)} ${n(p.top[id])})"><title>${text(told)}</title>${b.m}</g>`;
  }
  return { ...p, markup, width: p.width + (item.back.length ? S.back : 0) };
}

function box(id) {
  const item = items[id];
  if (!isOpen(id)) return item;
  const { markup, x, width, height } = inside(item), enter = x.in ?? width / 2, leave = x.out ?? width / 2;
  const shift = "in" in x ? Math.max(S.pad, item.tw - enter) : S.pad;
  const w = Math.max(2 * shift + width, item.tw + S.pad), first = S.bar + ("in" in x ? 0 : S.pad / 2);
  const h = first + height + ("out" in x ? 0 : S.pad);
  const frame = item.frame.replace('width="0" height="0"', `width="${n(w)}" height="${n(h)}"`);
  const lead = "in" in x ? `<path class="edge" d="M${n(shift + enter)} 0V${n(first)}"/>` : "";
  return { w, h, port: [shift + enter - w / 2, shift + leave - w / 2],
    m: `${frame}<rect class="bar" width="${n(w)}" height="${S.bar}"/>${lead}<g transform="translate(${n(shift)} ${n(first)})">${markup}</g>` };
}

function draw() {
  const { markup, width, height } = inside(items[data.root]);
  total = { w: width + 48, h: height + 48 };
  stage.innerHTML = `<svg class="graph" xmlns="http://www.w3.org/2000/svg" role="group" aria-label="Rewritten graph" ` +
    `viewBox="-24 -24 ${n(total.w)} ${n(total.h)}">${markup}</svg>`;
  mark();
  resize();
}

function resize() {
  stage.firstChild.setAttribute("width", n(total.w * scale));
  stage.firstChild.setAttribute("height", n(total.h * scale));
}

function mark() {
  stage.classList.toggle("searching", hits.size > 0);
  for (const node of stage.querySelectorAll("[data-id]")) {
    node.classList.toggle("selected", node.dataset.id === selected);
    node.classList.toggle("hit", hits.has(node.dataset.id));
  }
}

function fit(whole) {
  const { clientWidth: w, clientHeight: h } = stage, all = Math.min(w / total.w, h / total.h, 1.15);
  scale = whole ? all : Math.max(all, Math.min(0.85, w / total.w));
  resize();
  stage.scrollTo((total.w * scale - w) / 2, 0);
}

// Enlarge the drawing; what is at a point of the stage stays there.
function zoom(factor, x = stage.clientWidth / 2, y = stage.clientHeight / 2) {
  const before = scale, { scrollLeft, scrollTop } = stage;
  scale = Math.min(3, Math.max(0.02, scale * factor));
  resize();
  stage.scrollTo((scrollLeft + x) * scale / before - x, (scrollTop + y) * scale / before - y);
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

const shown = id => stage.querySelector(`[data-id="${CSS.escape(id)}"]`);

// The middle of a box on the screen, of the title of an opened module, and its upper edge.
function onScreen(id) {
  const { left, top, width, height } = shown(id).querySelector(".body").getBoundingClientRect();
  return { x: left + width / 2, y: top + (isOpen(id) ? S.bar * scale : height) / 2, top };
}

function toggle(id) {
  const before = onScreen(id);
  opened.has(id) ? opened.delete(id) : opened.add(id);
  draw();
  const after = onScreen(id);
  stage.scrollBy(after.x - before.x, after.top - before.top);
}

function activate(id) {
  show(id);
  if (items[id].kids) toggle(id);
  shown(id).focus({ preventScroll: true });
}

// Open the modules around a box, and move it to the middle of the stage.
function reveal(id) {
  for (let up = items[id].p; up; up = items[up].p) opened.add(up);
  scale = Math.max(scale, 0.8);
  draw();
  const at = onScreen(id), r = stage.getBoundingClientRect();
  stage.scrollBy(at.x - r.left - r.width / 2, at.y - r.top - r.height / 2);
}

let drag = null;
stage.addEventListener("pointerdown", event => { drag = event.pointerType === "mouse" ? { x: event.clientX, y: event.clientY, moved: false } : null; });
addEventListener("pointermove", event => {
  if (!drag || !event.buttons) return;
  const dx = drag.x - event.clientX, dy = drag.y - event.clientY;
  if (!drag.moved && Math.hypot(dx, dy) <= 4) return;
  stage.scrollBy(dx, dy);
  drag = { x: event.clientX, y: event.clientY, moved: true };
});
stage.addEventListener("click", event => {
  if (drag?.moved) return;
  const box = event.target.closest("[data-id]");
  if (!box) return show(null);
  if (box.classList.contains("frame") && !event.target.closest(".bar, .fold, text")) return show(box.dataset.id);
  activate(box.dataset.id);
});
stage.addEventListener("wheel", event => {
  event.preventDefault();
  const r = stage.getBoundingClientRect();
  zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX - r.left, event.clientY - r.top);
}, { passive: false });

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
});
const pressed = {
  fold: () => { opened.clear(); opened.add(data.root); draw(); fit(); },
  unfold: () => {
    const shut = [...stage.querySelectorAll("[data-id]")].map(box => box.dataset.id).filter(id => items[id].kids && !isOpen(id));
    shut.forEach(id => opened.add(id));
    draw();
    fit();
  },
  larger: () => zoom(1.25),
  smaller: () => zoom(0.8),
  fit: () => fit(true),
  theme: () => {
    const root = document.documentElement, now = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  },
};
for (const [id, act] of Object.entries(pressed)) document.getElementById(id).addEventListener("click", act);
draw();
fit();
show(null);
})();
