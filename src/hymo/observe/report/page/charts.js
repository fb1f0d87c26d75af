"use strict";
// One card with one chart. A chart overlays the runs; its lines are raw (faint) and smoothed.

const DASHES = [[], [8, 4], [2, 3], [11, 3, 2, 3], [5, 2], [1, 5]];
const FEW = 60; // a chart without a longer line is not smoothed
const FAR = 0.04; // a value this far from the cursor (as a share of the width) is not told of

/**
 * Mean of all values, weighed by weight^distance to both sides: it does not lag behind a curve that falls, as a moving
 * average of the past would. Gaps stay gaps.
 */
function smoothed(values, weight) {
  const sums = values.map(() => 0), weights = values.map(() => 0);
  const pass = (order, own) => {
    let sum = 0, total = 0;
    for (const i of order) {
      sum *= weight;
      total *= weight;
      if (!own) { sums[i] += sum; weights[i] += total; }
      if (values[i] != null) { sum += values[i]; total += 1; }
      if (own) { sums[i] += sum; weights[i] += total; }
    }
  };
  const order = [...values.keys()];
  pass(order, true);
  pass(order.reverse(), false);
  return values.map((v, i) => (v == null ? v : sums[i] / weights[i]));
}

class ChartCard {
  constructor(spec, page) {
    this.spec = spec;
    this.page = page;
    this.live = element("p", { class: "sr", "aria-live": "polite" });
    this.now = element("span", { class: "now" });
    this.names = element("div", { class: "names" });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.plot = element("div", { class: "plot", tabindex: 0, role: "group", "aria-roledescription": "chart" });
    const about = spec.about || spec.series.length < 2 ? element("p", { class: "about" }, spec.about) : null;
    this.element = element(
      "div", { class: spec.wide ? "card wide" : "card", "data-chart": spec.id },
      element("div", { class: "head" }, element("h3", {}, spec.title), this.now),
      about, this.names, this.plot, this.live,
    );
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("focus", () => { this.focused = this.plot.matches(":focus-visible"); });
    this.plot.addEventListener("blur", () => { this.focused = false; this.tip.hidden = true; });
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }

  get log() {
    return this.spec.log || (this.page.logLoss && ["loss", "val_loss", "total_loss", "mtp"].includes(this.spec.id));
  }

  get height() {
    return this.spec.wide ? 310 : 215;
  }

  /** Everything that is drawn: [{x, y, run, name, role}], role: main, raw, lo, hi, plan or point. */
  lines() {
    const { page, spec } = this, lines = [];
    const long = page.runs.some((run) => spec.series.some((name) => run.series[name]?.y.length > FEW));
    const weight = spec.smooth && long ? page.smoothing : 0;
    page.runs.forEach((run, r) => {
      if (page.hidden.has(r)) return;
      spec.series.forEach((name, s) => {
        const series = run.series[name];
        const base = { run: r, name, place: s };
        if (spec.kind === "rate" && run.schedule) {
          lines.push({ ...base, role: "plan", x: run.schedule[page.across], y: run.schedule[name] });
        }
        if (!series) return;
        const x = run.axes[series.axis][page.across];
        if (series.lo) {
          lines.push({ ...base, role: "lo", x, y: series.lo }, { ...base, role: "hi", x, y: series.hi });
        } else if (weight > 0) lines.push({ ...base, role: "raw", x, y: series.y });
        lines.push({ ...base, role: "main", x, y: weight > 0 ? smoothed(series.y, weight) : series.y });
        if (spec.kind === "rate") lines.push({ ...base, role: "point", x: x.slice(-1), y: series.y.slice(-1) });
      });
    });
    return lines.map((line) => this.usable(line)).filter((line) => line.x.length);
  }

  /** Without points that have no place, and in a logarithmic chart without those that have no logarithm. */
  usable(line) {
    const x = [], y = [];
    let last = -Infinity;
    line.x.forEach((at, i) => {
      if (at == null || !(at > last)) return;
      last = at;
      x.push(at);
      y.push(this.log && !(line.y[i] > 0) ? null : line.y[i]);
    });
    return { ...line, x, y };
  }

  stroke(line) {
    const place = this.page.runs.length > 1 ? line.run : line.place;
    return colour(`--run-${place % 8}`);
  }

  dash(line) {
    const many = this.page.runs.length > 1;
    return DASHES[(many ? line.place + 2 * Math.floor(line.run / 8) : Math.floor(line.place / 8)) % DASHES.length];
  }

  series(line) {
    const rgb = this.stroke(line), few = line.x.length <= 40, dots = this.spec.kind === "dots";
    const points = { show: dots || few, size: dots ? 6 : 4, fill: css(rgb) };
    const looks = {
      main: { stroke: css(rgb), width: 2, points },
      raw: { stroke: css(rgb, 0.28), width: 1, points: { show: false } },
      plan: { stroke: css(rgb, 0.4), width: 1.5, points: { show: false } },
      point: { stroke: css(rgb), width: 0, points: { show: true, size: 9, fill: css(rgb) } },
      lo: { stroke: css(rgb, 0), width: 0, points: { show: false } },
      hi: { stroke: css(rgb, 0), width: 0, points: { show: false } },
    };
    return { ...looks[line.role], dash: line.role === "main" ? this.dash(line) : [], label: line.name };
  }

  /** Draw anew: after new rows, another theme, smoothing or choice of runs. */
  draw() {
    const lines = this.lines();
    const cursor = this.plotted?.cursor; // a reader who points at the chart goes on doing so
    this.drawn = lines;
    this.plotted?.destroy();
    this.plotted = null;
    this.element.hidden = !lines.some((line) => line.role === "main");
    if (this.element.hidden || !this.plot.clientWidth) return;
    const data = uPlot.join(lines.map((line) => [line.x, line.y]));
    const bands = [];
    lines.forEach((line, i) => {
      if (line.role === "hi") bands.push({ series: [i + 1, i], fill: css(this.stroke(line), 0.2) });
    });
    this.plotted = new uPlot({ ...this.options(lines), bands }, data, this.plot);
    this.plot.append(this.tip);
    const over = this.plotted.over;
    over.addEventListener("mouseenter", () => { this.hovered = true; });
    over.addEventListener("mouseleave", () => { this.hovered = false; this.tip.hidden = true; });
    over.addEventListener("dblclick", () => this.page.zoomTo(null));
    this.describe(lines);
    if ((this.hovered || this.focused) && cursor?.left >= 0) {
      this.plotted.setCursor({ left: cursor.left, top: cursor.top });
    }
  }

  options(lines) {
    const soft = css(colour("--soft")), grid = css(colour("--grid")), font = "12px system-ui, sans-serif";
    const axis = { stroke: soft, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const across = this.page.across === "tokens" ? "count" : "number";
    const ticks = this.log ? logTicks : this.spec.unit === "bytes" ? byteTicks : niceTicks;
    return {
      width: this.plot.clientWidth, height: this.height, legend: { show: false }, padding: [10, 12, 0, 0],
      scales: {
        x: { time: false, range: () => this.range() },
        y: { distr: this.log ? 3 : 1, range: (u, min, max) => this.rangeOfValues(min, max) },
      },
      series: [{}, ...lines.map((line) => this.series(line))],
      axes: [
        {
          ...axis, size: 30, gap: 6, space: 70,
          values: (u, at) => at.map((v) => (Number.isInteger(v) ? tick(v, across) : "")),
        },
        {
          ...axis, gap: 6, size: (u, labels) => 14 + 7 * Math.max(2, ...(labels || []).map((l) => l.length)),
          splits: (u, i, min, max) => ticks(min, max, Math.max(2, this.height / 52)), filter: (u, at) => at,
          values: (u, at) => at.map((v) => tick(v, this.spec.unit)),
        },
      ],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false },
        sync: {
          key: "hymo", scales: ["x", null],
          filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
        },
        dataIdx: (u, i, at) => this.nearest(u, i, at),
        points: { size: (u, i) => (i > 0 && lines[i - 1].role === "main" ? 8 : 0) },
      },
      hooks: {
        draw: [(u) => this.drawMarks(u)],
        setCursor: [(u) => this.tell(u)],
        setSelect: [(u) => this.selected(u)],
      },
    };
  }

  range() {
    const { page } = this;
    if (page.zoom) return page.zoom;
    const ends = page.ends(this.spec.kind === "rate");
    return ends[0] < ends[1] ? ends : [ends[0] - 1, ends[1] + 1];
  }

  rangeOfValues(min, max) {
    if (min == null || max == null) return this.log ? [0.1, 1] : [0, 1];
    if (this.log) return [min / 1.12, max * 1.12];
    if (this.spec.unit === "bytes" || this.spec.unit === "count" || this.spec.kind === "rate") min = Math.min(min, 0);
    const room = max > min ? 0.06 * (max - min) : Math.abs(max) * 0.1 || (this.spec.unit === "percent" ? 0.01 : 1);
    return [min === 0 || (min > 0 && min - room < 0) ? 0 : min - room, max + room];
  }

  /** The point of series i that is nearest to a place in the joined x values, as far as one is there. */
  nearest(u, i, at) {
    const y = u.data[i];
    if (i === 0 || y[at] != null) return at;
    for (let away = 1; away < y.length; away++) {
      if (y[at - away] != null) return at - away;
      if (y[at + away] != null) return at + away;
    }
    return at;
  }

  selected(u) {
    const { left, width } = u.select;
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (width > 4) this.page.zoomTo([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  }

  drawMarks(u) {
    const { ctx, bbox } = u, { page } = this, bad = css(colour("--bad")), dpr = devicePixelRatio || 1;
    ctx.save();
    page.runs.forEach((run, r) => {
      if (page.hidden.has(r)) return;
      for (const mark of run.marks) {
        const at = mark[page.across];
        if (at == null || at < u.scales.x.min || at > u.scales.x.max) continue;
        const x = Math.round(u.valToPos(at, "x", true)) + 0.5;
        if (mark.kind === "skip") {
          const s = 5 * dpr;
          ctx.fillStyle = bad;
          ctx.beginPath();
          ctx.moveTo(x - s, bbox.top - 1.6 * s);
          ctx.lineTo(x + s, bbox.top - 1.6 * s);
          ctx.lineTo(x, bbox.top);
          ctx.fill();
          continue;
        }
        ctx.strokeStyle = css(page.runs.length > 1 ? colour(`--run-${r % 8}`) : colour("--soft"), 0.8);
        ctx.lineWidth = (mark.kind === "branch" ? 1.6 : 1.2) * dpr;
        ctx.setLineDash(mark.kind === "branch" ? [] : [4 * dpr, 4 * dpr]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
    });
    ctx.restore();
  }

  /** The readout beside the cursor; of charts that only follow another one's cursor there is none. */
  tell(u) {
    const at = u.cursor.idx;
    this.tip.hidden = !(this.hovered || this.focused) || at == null || u.cursor.left < 0;
    if (this.tip.hidden) return;
    const { page } = this, x = u.data[0][at], span = u.scales.x.max - u.scales.x.min, rows = [];
    let told = null;
    this.drawn.forEach((line, i) => {
      if (line.role !== "main") return;
      const j = this.nearest(u, i + 1, at), value = u.data[i + 1][j];
      if (value == null || Math.abs(u.data[0][j] - x) > FAR * span) return;
      told = told ?? u.data[0][j];
      // A line's raw values stand right before it.
      rows.push(this.row(line, value, this.drawn[i - 1]?.role === "raw" ? u.data[i][j] : null));
    });
    const place = told ?? x;
    const title = page.across === "tokens" ? `${shown(place, "count")} tokens` : `update ${whole(place)}`;
    const events = page.marksNear(x, 0.008 * span).map((text) => element("div", { class: "happened" }, text));
    this.tip.replaceChildren(element("b", {}, title), ...rows, ...events);
    if (this.focused) this.live.textContent = this.tip.innerText.replace(/\n+/g, ", ");
    const wide = this.tip.offsetWidth, left = u.over.offsetLeft + u.cursor.left;
    const fits = left + 16 + wide < this.plot.clientWidth;
    this.tip.style.left = `${fits ? left + 14 : Math.max(0, left - wide - 14)}px`;
    this.tip.style.top = `${u.over.offsetTop + 8}px`;
  }

  row(line, value, raw) {
    const { page } = this, mark = element("span", { class: "swatch" });
    mark.style.background = css(this.stroke(line));
    const words = page.runs.length > 1 ? [page.runs[line.run].name] : [];
    if (this.spec.series.length > 1 || !words.length) words.push(label(line.name));
    const before = raw == null ? null : element("span", { class: "raw" }, `raw ${shown(raw, this.spec.unit)}`);
    return element(
      "div", {}, mark, element("span", { class: "name" }, words.join(" / ")),
      element("span", { class: "value" }, shown(value, this.spec.unit), before),
    );
  }

  key(event) {
    const u = this.plotted;
    if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
    const x = u.data[0], { min, max } = u.scales.x, inside = [];
    x.forEach((v, i) => { if (v >= min && v <= max) inside.push(i); });
    const at = inside.indexOf(u.cursor.idx ?? inside.at(-1)), far = event.shiftKey ? 10 : 1;
    const places = { ArrowLeft: at - far, ArrowRight: at + far, Home: 0, End: inside.length - 1 };
    if (event.key in places) {
      const i = inside[Math.min(Math.max(places[event.key], 0), inside.length - 1)];
      this.focused = true;
      u.setCursor({ left: u.valToPos(x[i], "x"), top: 10 });
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const middle = u.cursor.idx == null ? (min + max) / 2 : x[u.cursor.idx];
      const half = ((max - min) / 2) * (event.key === "-" ? 2 : 0.5);
      this.page.zoomTo([middle - half, middle + half]);
    } else if (event.key === "Escape") {
      this.tip.hidden = true;
      this.page.zoomTo(null);
    } else return;
    event.preventDefault();
  }

  /** The last value, the names of the lines, and the chart in words. */
  describe(lines) {
    const { page, spec } = this, main = lines.filter((line) => line.role === "main");
    const last = (line) => shown(line.y.findLast((v) => v != null), spec.unit);
    const smooth = spec.smooth && page.smoothing > 0 && lines.some((line) => line.role === "raw" || line.role === "lo");
    const before = smooth ? [element("span", { class: "raw" }, "smoothed ")] : [];
    this.now.replaceChildren(...(main.length === 1 ? [...before, last(main[0])] : []));
    const ends = main.map((line) => `${page.runs[line.run].name} ${label(line.name)} ${last(line)}`);
    this.plot.setAttribute("aria-label", `${spec.title}. Last: ${ends.join("; ")}. Arrow keys read values.`);
    const names = spec.series.filter((name) => main.some((line) => line.name === name));
    const samples = names.map((name) => this.sample(main.find((line) => line.name === name)));
    this.names.replaceChildren(...(spec.series.length > 1 ? samples : []));
  }

  /** A piece of the line beside its name. */
  sample(line) {
    const [svg, path] = ["svg", "line"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
    const stroke = css(this.page.runs.length > 1 ? colour("--soft") : this.stroke(line));
    const dashes = this.dash(line).join(" ");
    const looks = { x1: 0, x2: 26, y1: 4, y2: 4, stroke, "stroke-width": 2, "stroke-dasharray": dashes };
    for (const [k, v] of Object.entries({ width: 26, height: 8, "aria-hidden": "true" })) svg.setAttribute(k, v);
    for (const [k, v] of Object.entries(looks)) path.setAttribute(k, v);
    svg.append(path);
    return element("span", {}, svg, label(line.name));
  }

  resize() {
    if (!this.plotted) this.draw();
    else if (this.plot.clientWidth && this.plot.clientWidth !== this.plotted.width) {
      this.plotted.setSize({ width: this.plot.clientWidth, height: this.height });
    }
  }

  rescale() {
    const [min, max] = this.range();
    this.plotted?.setScale("x", { min, max });
  }
}

/** A row's name in words. */
function label(name) {
  return name.replace(/@eval$/, "").replace(/^(grad_norm|update_rms|memory)_/, "").replaceAll("_", " ");
}
