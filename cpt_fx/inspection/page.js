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
function apart(plan, boxes, straight) {
  const from = Object.values(plan.x).sort((a, b) => a - b).reduce((all, x) => x - all[all.length - 1] < 24 ? all : [...all, x], []);
  const column = id => from.filter(x => x <= plan.x[id]).length - 1, last = from.length - 1;
  const half = id => (boxes.get(id)?.w ?? S.lane) / 2, aside = id => plan.x[id] - from[column(id)] - straight(id);
  const pairs = plan.rows.flatMap(row => row.slice(1).map((b, i) => {
    const a = row[i], gap = (a + b).includes("~") ? S.tight : S.gapX;
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
  const straight = id => { const [a, b] = boxes.get(id)?.port ?? [0, 0]; return Math.abs(a - b) < 6 ? a : 0; };
  const to = apart(plan, boxes, straight), x = new Map(), rowOf = new Map(), top = new Map(), rowTop = [], rowHeight = [];
  let left = Infinity, right = -Infinity, y = 0, gap = 0;
  plan.rows.forEach((row, r) => {
    const height = Math.max(0, ...row.map(id => boxes.get(id)?.h ?? 0));
    y += height && r ? gap : Math.min(gap, S.portY);
    rowTop.push(y);
    rowHeight.push(height);
    for (const id of row) {
      const at = to(id), half = (boxes.get(id)?.w ?? S.lane) / 2;
      left = Math.min(left, at - half);
      right = Math.max(right, at + half);
      x.set(id, at);
      rowOf.set(id, r);
      top.set(id, y + (height - (boxes.get(id)?.h ?? height)) / 2);
    }
    y += height;
    gap = height ? S.gapY : S.portY;
  });
  for (const [id, at] of x) x.set(id, at - left);
  return { x, top, rowOf, rowTop, rowHeight, width: x.size ? right - left : 0, height: y };
}

function edge(chain, aside, p, boxes) {
  const first = chain[0], last = chain[chain.length - 1], from = boxes.get(first), to = boxes.get(last);
  let r = p.rowOf.get(first), x = p.x.get(first) + (from?.port?.[1] ?? 0);
  let path = `M${n(x)} ${n(p.top.get(first) + (from?.h ?? (first.includes("~") ? p.rowHeight[r] : 0)))}`;
  for (const id of chain.slice(1)) {
    const bottom = p.rowTop[r] + p.rowHeight[r], top = p.rowTop[++r], middle = n((bottom + top) / 2);
    const next = p.x.get(id) + (id === last ? to?.port?.[0] ?? aside : 0);
    if (Math.abs(next - x) < 0.05) path += `V${n(top)}`;
    else path += `V${n(bottom)}C${n(x)} ${middle} ${n(next)} ${middle} ${n(next)} ${n(top)}`;
    x = next;
  }
  if (!to) return `<path class="edge" d="${path}"/>`;
  const end = p.top.get(last) - 1;
  return `<path class="edge" d="${path}V${n(end)}"/><path class="tip" d="M${n(x)} ${n(end)}l-3.5 -6h7z"/>`;
}

function back([a, b], p, boxes) {
  const ax = n(p.x.get(a) + boxes.get(a).w / 2), ay = n(p.top.get(a) + boxes.get(a).h / 2);
  const bx = n(p.x.get(b) + boxes.get(b).w / 2 + 1), by = n(p.top.get(b) + boxes.get(b).h / 2), far = n(p.width + S.back);
  return `<path class="edge back" d="M${ax} ${ay}C${far} ${ay} ${far} ${by} ${bx} ${by}"/><path class="tip" d="M${bx} ${by}l6 -3.5v7z"/>`;
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
      `transform="translate(${n(p.x.get(id) - b.w / 2)} ${n(p.top.get(id))})"><title>${text(told)}</title>${b.m}</g>`;
  }
  return { markup, p, width: p.width + (item.back.length ? S.back : 0) };
}

function box(id) {
  const item = items[id];
  if (!isOpen(id)) return { w: item.w, h: item.h, m: item.m };
  const { markup, p, width: wide } = inside(item);
  const entered = p.x.has("in"), left = p.x.has("out");
  const enter = p.x.get("in") ?? wide / 2, leave = p.x.get("out") ?? wide / 2;
  const shift = entered ? Math.max(S.pad, item.tw - enter) : S.pad;
  const w = Math.max(2 * shift + wide, item.tw + S.pad), first = S.bar + (entered ? 0 : S.pad / 2);
  const h = first + p.height + (left ? 0 : S.pad);
  const frame = item.frame.replace('width="0" height="0"', `width="${n(w)}" height="${n(h)}"`);
  const lead = entered ? `<path class="edge" d="M${n(shift + enter)} 0V${n(first)}"/>` : "";
  return { w, h, port: [shift + enter - w / 2, shift + leave - w / 2],
    m: `${frame}<rect class="bar" width="${n(w)}" height="${S.bar}"/>${lead}<g transform="translate(${n(shift)} ${n(first)})">${markup}</g>` };
}

function draw() {
  const { markup, p, width } = inside(items[data.root]);
  total = { w: width + 48, h: p.height + 48 };
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
stage.addEventListener("pointerdown", event => { if (event.pointerType === "mouse") drag = { x: event.clientX, y: event.clientY, moved: false }; });
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
