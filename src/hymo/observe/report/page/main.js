"use strict";
// The page: what all charts share, the controls, the theme, and news from the server where there is one.

const REFRESH_MS = 2000;

class Page {
  constructor(data) {
    this.hidden = new Set();
    this.zoom = null;
    this.across = "step";
    this.logLoss = false;
    this.smoothing = 0;
    this.cards = new Map();
    this.heat = new HeatCard(this);
    this.take(data);
    this.smoothing = this.usualSmoothing();
  }

  take(data) {
    this.runs = data.runs;
    this.charts = data.charts;
    const noTokens = this.runs.some((run) => run.axes.some((axis) => axis.tokens.every((v) => v == null)));
    document.querySelector("#across option[value=tokens]").disabled = noTokens;
    document.querySelector("#controls").hidden = !this.charts.length;
  }

  /** None for a few points, more for many. */
  usualSmoothing() {
    const most = Math.max(0, ...this.runs.map((run) => run.series.loss?.y.length ?? 0));
    return most < 40 ? 0 : most < 1000 ? 0.8 : 0.9;
  }

  /** Cards in their sections; the order is that of the list of charts. */
  build() {
    for (const section of document.querySelectorAll("section.charts")) {
      const specs = this.charts.filter((chart) => chart.section === section.dataset.section);
      const cards = specs.map((spec) => this.card(spec).element);
      const heat = section.dataset.section === "Experts" && this.runs.some((run) => run.experts);
      if (heat) cards.unshift(this.heat.element);
      section.hidden = !cards.length;
      const narrow = specs.filter((spec) => !spec.wide).map((spec) => this.cards.get(spec.id).element);
      narrow.forEach((card, i) => card.classList.toggle("alone", narrow.length % 2 === 1 && i === narrow.length - 1));
      const grid = section.querySelector(".grid");
      const same = cards.length === grid.children.length && cards.every((card, i) => card === grid.children[i]);
      if (!same) grid.replaceChildren(...cards); // the cards that stay keep the reader's place
    }
    const known = new Set(this.charts.map((chart) => chart.id));
    for (const id of [...this.cards.keys()]) if (!known.has(id)) this.cards.delete(id);
    const names = JSON.stringify(this.runs.map((run) => run.name));
    if (names !== this.named) this.legend();
    this.named = names;
  }

  card(spec) {
    const card = this.cards.get(spec.id) ?? new ChartCard(spec, this);
    card.spec = spec;
    this.cards.set(spec.id, card);
    return card;
  }

  draw() {
    for (const card of this.cards.values()) card.draw();
    this.heat.draw();
    document.body.dataset.drawn = [...this.cards.values()].filter((card) => card.plotted).length;
  }

  /** One button for each run: the page's legend. */
  legend() {
    const buttons = this.runs.length < 2 ? [] : this.runs.map((run, r) => {
      const button = element(
        "button", { type: "button", "aria-pressed": String(!this.hidden.has(r)) },
        element("span", { class: `swatch run-${r % 8}` }), run.name,
      );
      button.addEventListener("click", () => {
        this.hidden.has(r) ? this.hidden.delete(r) : this.hidden.add(r);
        button.setAttribute("aria-pressed", String(!this.hidden.has(r)));
        document.querySelector(`article[data-run="${r}"]`)?.classList.toggle("off", this.hidden.has(r));
        this.draw();
      });
      return button;
    });
    document.querySelector("#legend").replaceChildren(...buttons);
  }

  /** First and last x of the runs shown, with the whole schedule if asked. */
  ends(withSchedule) {
    const found = [];
    this.runs.forEach((run, r) => {
      if (this.hidden.has(r)) return;
      const places = run.axes.map((axis) => axis[this.across]);
      if (withSchedule && run.schedule) places.push(run.schedule[this.across]);
      for (const place of places) found.push(place[0], place.at(-1));
    });
    const known = found.filter((v) => v != null);
    return known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  }

  zoomTo(range) {
    if (range) {
      const [low, high] = this.ends(true);
      range = [Math.max(range[0], low), Math.min(range[1], high)];
      if (range[0] <= low && range[1] >= high) range = null;
      else if (!(range[1] - range[0] > (high - low) * 1e-4)) return;
    }
    this.zoom = range;
    document.querySelector("#reset").disabled = !range;
    for (const card of this.cards.values()) card.rescale();
  }

  marksNear(x, within) {
    const found = [];
    this.runs.forEach((run, r) => {
      if (this.hidden.has(r)) return;
      for (const mark of run.marks) {
        if (mark[this.across] == null || Math.abs(mark[this.across] - x) > within) continue;
        found.push(this.runs.length > 1 ? `${run.name}: ${mark.text}` : mark.text);
      }
    });
    return found.length > 4 ? [...found.slice(0, 4), `and ${found.length - 4} more`] : found;
  }
}

/** Texts of the page; they come escaped from the program that wrote or serves it. */
function showTexts(texts) {
  for (const [name, html] of Object.entries(texts)) {
    const place = document.querySelector(`#text-${name}`);
    if (place.innerHTML !== html) place.innerHTML = html;
  }
  hideEmpty();
}

function hideEmpty() {
  for (const name of ["differences", "events", "samples", "configs"]) {
    document.querySelector(`#${name}`).hidden = !document.querySelector(`#text-${name}`).hasChildNodes();
  }
}

function theme(page) {
  const button = document.querySelector("#theme"), kinds = ["auto", "light", "dark"];
  const store = (value) => { try { localStorage.setItem("hymo-theme", value); } catch { /* not kept, then */ } };
  let chosen = "auto";
  try { chosen = localStorage.getItem("hymo-theme") ?? "auto"; } catch { /* a page from a file may have no store */ }
  if (!kinds.includes(chosen)) chosen = "auto";
  const apply = () => {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    button.textContent = `Theme: ${chosen}`;
    button.setAttribute("aria-label", `Colours: ${chosen === "auto" ? "as the system" : chosen}; press for the next`);
  };
  button.addEventListener("click", () => {
    chosen = kinds[(kinds.indexOf(chosen) + 1) % kinds.length];
    store(chosen);
    apply();
    page.draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.draw());
  apply();
}

function controls(page) {
  const smoothing = document.querySelector("#smoothing"), said = document.querySelector("#smoothing-value");
  const show = () => { said.textContent = page.smoothing.toFixed(2); };
  smoothing.value = page.smoothing;
  show();
  smoothing.addEventListener("input", () => { page.smoothing = Number(smoothing.value); show(); page.draw(); });
  document.querySelector("#across").addEventListener("change", (event) => {
    page.across = event.target.value;
    page.zoomTo(null);
    page.draw();
  });
  document.querySelector("#log-loss").addEventListener("change", (event) => {
    page.logLoss = event.target.checked;
    page.draw();
  });
  document.querySelector("#reset").addEventListener("click", () => page.zoomTo(null));
}

/** Ask for newer numbers every two seconds, while the page is seen. */
function follow(page) {
  let version = 0;
  document.querySelector("#live").hidden = false;
  const ask = async () => {
    try {
      const answer = document.hidden ? null : await fetch(`data.json?version=${version}`);
      if (answer?.status === 200) {
        const data = await answer.json();
        version = data.version;
        page.take(data);
        showTexts(data.fragments);
        document.querySelector("#title").textContent = data.title;
        document.querySelector("#made").textContent = data.made;
        page.build();
        page.draw();
      }
      if (answer) document.body.classList.toggle("lost", !answer.ok);
    } catch {
      document.body.classList.add("lost");
    }
    document.querySelector("#live").textContent = document.body.classList.contains("lost") ? "no answer, " : "live, ";
    setTimeout(ask, REFRESH_MS);
  };
  setTimeout(ask, REFRESH_MS);
}

{
  const data = JSON.parse(document.querySelector("#data").textContent);
  const page = new Page(data);
  theme(page);
  controls(page);
  hideEmpty();
  page.build();
  page.draw();
  if (data.watch) follow(page);
}
