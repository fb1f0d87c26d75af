"use strict";
// The load of the experts: every layer at one moment, or one layer over the run. 1 is an even share.

const OCTAVE = 1; // the colours end at half and at twice the even share

function mix(a, b, share) {
  return a.map((v, i) => v + (b[i] - v) * share);
}

class HeatCard {
  constructor(page) {
    this.page = page;
    this.run = 0;
    this.layer = null; // null: all layers at one moment
    this.moment = null; // null: the last one
    this.at = null;
    this.tools = element("div", { class: "tools" });
    this.canvas = element("canvas", { class: "heat", tabindex: "0", role: "img" });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.live = element("p", { class: "sr", "aria-live": "polite" });
    this.ramp = element("i");
    const plot = element("div", { class: "plot" }, this.canvas, this.tip);
    this.element = element(
      "div", { class: "card wide", "data-chart": "experts" },
      element("div", { class: "head" }, element("h3", {}, "Load of the experts")),
      element("p", { class: "about" }, "Assignments of each expert over the mean of its layer"),
      this.tools, plot,
      element("div", { class: "ramp" }, "half", this.ramp, "twice the even share"), this.live,
    );
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("blur", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.paint()).observe(plot);
  }

  get experts() {
    return this.page.runs[this.run]?.experts;
  }

  draw() {
    const having = this.page.runs.map((run, r) => r).filter((r) => this.page.runs[r].experts);
    this.element.hidden = !having.length;
    if (!having.length) return;
    if (!this.experts) this.run = having[0];
    this.choose(having);
    this.paint();
  }

  /** Which run, which view, which moment. */
  choose(having) {
    const options = (values, chosen) => values.map(([v, text]) => {
      const option = element("option", { value: v }, text);
      option.selected = String(v) === String(chosen);
      return option;
    });
    const run = element("select", {}, ...options(having.map((r) => [r, this.page.runs[r].name]), this.run));
    run.addEventListener("change", () => { this.run = Number(run.value); this.moment = null; this.draw(); });
    const views = [["", "all layers, one moment"], ...this.experts.layers.map((name, n) => [n, `${name} over the run`])];
    const view = element("select", {}, ...options(views, this.layer ?? ""));
    view.addEventListener("change", () => { this.layer = view.value === "" ? null : Number(view.value); this.draw(); });
    const last = this.experts.step.length - 1;
    const slider = element("input", { type: "range", min: 0, max: last, step: 1, value: this.moment ?? last });
    const said = element("output", {}, this.said(this.moment ?? last));
    slider.addEventListener("input", () => {
      this.moment = Number(slider.value) === last ? null : Number(slider.value);
      said.textContent = this.said(Number(slider.value));
      this.paint();
    });
    this.tools.replaceChildren(
      ...(having.length > 1 ? [element("label", {}, "Run ", run)] : []), element("label", {}, "Show ", view),
      ...(this.layer === null && last > 0 ? [element("label", {}, "Moment ", slider, said)] : []),
    );
  }

  said(moment) {
    return `update ${whole(this.experts.step[moment])}`;
  }

  /** The numbers of the view, by row and column, and what the rows and columns are. */
  table() {
    const { load, layers, step } = this.experts;
    if (this.layer === null) {
      const rows = load[Math.min(this.moment ?? load.length - 1, load.length - 1)];
      return { rows, names: layers, columns: rows[0].map((_, e) => String(e)), title: "expert" };
    }
    const experts = load[0][this.layer].map((_, e) => e);
    return {
      rows: experts.map((e) => load.map((at) => at[this.layer][e])), names: experts.map((e) => `expert ${e}`),
      columns: step.map((s) => whole(s)), title: "update",
    };
  }

  paint() {
    const width = this.canvas.parentElement.clientWidth;
    if (!this.experts || !width) return;
    const { rows, names, columns, title } = this.table(), dpr = devicePixelRatio || 1;
    const left = 16 + 7 * Math.max(...names.map((n) => n.length)), foot = 38;
    const tall = Math.min(34, Math.max(13, 300 / rows.length));
    const height = rows.length * tall + foot, cell = (width - left) / columns.length;
    Object.assign(this.canvas, { width: width * dpr, height: height * dpr });
    this.canvas.style.height = `${height}px`;
    const ctx = this.canvas.getContext("2d");
    ctx.scale(dpr, dpr);
    ctx.font = "12px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    this.ends = [colour("--low"), colour("--even"), colour("--high")];
    const ink = css(colour("--ink")), soft = css(colour("--soft")), gap = cell > 8 ? 1.5 : 0;
    rows.forEach((row, r) => {
      ctx.fillStyle = soft;
      ctx.textAlign = "right";
      if (tall >= 13) ctx.fillText(names[r], left - 9, (r + 0.5) * tall);
      row.forEach((value, c) => {
        const rgb = this.shade(value);
        ctx.fillStyle = css(rgb);
        ctx.fillRect(left + c * cell, r * tall, cell - gap, tall - (gap || 0.5));
        if (cell > 34 && tall >= 16) {
          ctx.fillStyle = light(rgb) ? "#16181c" : "#ffffff";
          ctx.textAlign = "center";
          ctx.fillText(value.toFixed(2), left + (c + 0.5) * cell - gap / 2, (r + 0.5) * tall);
        }
      });
    });
    this.foot(ctx, columns, title, left, cell, rows.length * tall, soft);
    if (this.at) {
      ctx.strokeStyle = ink;
      ctx.lineWidth = 2;
      ctx.strokeRect(left + this.at[1] * cell, this.at[0] * tall, cell - gap, tall - gap);
    }
    this.shape = { left, cell, tall, rows, names, columns, title };
    this.ramp.style.background = `linear-gradient(90deg, ${this.ends.map((c) => css(c)).join(", ")})`;
    const [least, most] = [Math.min(...rows.flat()), Math.max(...rows.flat())].map((v) => v.toFixed(2));
    const words = `Load of the experts, from ${least} to ${most} of an even share. Arrow keys read cells.`;
    this.canvas.setAttribute("aria-label", words);
  }

  foot(ctx, columns, title, left, cell, top, soft) {
    ctx.fillStyle = soft;
    const every = Math.ceil(columns.length / Math.max(1, Math.floor((cell * columns.length) / 52)));
    columns.forEach((name, c) => {
      ctx.textAlign = "center";
      if (c % every === 0) ctx.fillText(name, left + (c + 0.5) * cell, top + 12);
    });
    ctx.textAlign = "left";
    ctx.fillText(title, left, top + 29);
  }

  shade(value) {
    const octaves = Math.max(-OCTAVE, Math.min(OCTAVE, Math.log2(Math.max(value, 1e-6)))) / OCTAVE;
    const [low, even, high] = this.ends;
    return octaves < 0 ? mix(even, low, -octaves) : mix(even, high, octaves);
  }

  point(event) {
    const { left, cell, tall, rows, columns } = this.shape, box = this.canvas.getBoundingClientRect();
    const r = Math.floor((event.clientY - box.top) / tall), c = Math.floor((event.clientX - box.left - left) / cell);
    this.tip.hidden = r < 0 || c < 0 || r >= rows.length || c >= columns.length;
    if (!this.tip.hidden) this.tell(r, c);
  }

  tell(r, c) {
    const { left, cell, tall, rows, names, columns, title } = this.shape;
    const where = element("b", {}, `${names[r]}, ${title} ${columns[c]}`);
    this.tip.replaceChildren(where, `${rows[r][c].toFixed(3)} of an even share`);
    this.tip.hidden = false;
    const x = left + (c + 1) * cell + 8, wide = this.tip.offsetWidth;
    this.tip.style.left = `${x + wide < this.canvas.clientWidth ? x : Math.max(0, left + c * cell - wide - 8)}px`;
    this.tip.style.top = `${Math.max(0, r * tall - 6)}px`;
  }

  key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(event.key in moves) || !this.shape) return;
    const { rows, columns } = this.shape, [r, c] = this.at ?? [0, 0], [dr, dc] = this.at ? moves[event.key] : [0, 0];
    this.at = [Math.min(Math.max(r + dr, 0), rows.length - 1), Math.min(Math.max(c + dc, 0), columns.length - 1)];
    this.paint();
    this.tell(...this.at);
    this.live.textContent = this.tip.innerText.replace(/\n+/g, ", ");
    event.preventDefault();
  }
}

function light([r, g, b]) {
  return 0.299 * r + 0.587 * g + 0.114 * b > 140;
}
