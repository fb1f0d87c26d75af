"use strict";
// Numbers as a person reads them, elements without HTML, colours as the style sheet has them.

function significant(value, digits) {
  const text = value.toPrecision(digits);
  return text.includes("e") ? text.replace(/\.?0+e/, "e") : text;
}

function scaled(value, units, digits) {
  for (const [limit, unit] of units) {
    if (Math.abs(value) >= limit) return significant(value / limit, digits) + unit;
  }
  return significant(value, digits);
}

const COUNTS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
const BYTES = [[2 ** 40, " TiB"], [2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"]];

/** A value with its unit, to four digits. */
function shown(value, unit) {
  if (value == null) return "n/a";
  if (unit === "percent") return significant(100 * value, 3) + " %";
  if (unit === "bytes") return scaled(value, BYTES, 3);
  if (unit === "count") return scaled(value, COUNTS, 3);
  if (unit === "rate") return value === 0 ? "0" : value.toExponential(2);
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : significant(value, 4);
}

/** A label of an axis: as short as it can be. */
function tick(value, unit) {
  if (value === 0) return "0";
  const plain = (v) => String(Number(v.toPrecision(6)));
  if (unit === "percent") return plain(100 * value) + " %";
  const units = unit === "bytes" ? BYTES : COUNTS;
  if (unit === "bytes" || Math.abs(value) >= 10000 || (unit === "count" && Math.abs(value) >= 1000)) {
    for (const [limit, name] of units) if (Math.abs(value) >= limit) return Number((value / limit).toPrecision(4)) + name;
  }
  if (Math.abs(value) < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return plain(value);
}

/** At most n + 1 round numbers from min to max. */
function niceTicks(min, max, n) {
  const rough = (max - min) / Math.max(n, 1);
  if (!(rough > 0)) return [min];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(min / step - 1e-9); i * step <= max + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

/** Round numbers of the unit that the largest value is read in. */
function byteTicks(min, max, n) {
  const unit = (BYTES.find(([limit]) => max >= limit) ?? [1])[0];
  return niceTicks(min / unit, max / unit, n).map((v) => v * unit);
}

/** Ticks of a logarithmic axis: round numbers in a small span, 1 2 5 in a larger one, decades in a wide one. */
function logTicks(min, max, n) {
  const decades = Math.log10(max / min);
  if (decades < 0.9) return niceTicks(min, max, n).filter((v) => v > 0);
  const every = Math.max(1, Math.ceil(decades / n));
  const inside = decades < 3 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let e = Math.floor(Math.log10(min)); e <= Math.ceil(Math.log10(max)); e++) {
    if (e % every === 0) for (const m of inside) ticks.push(m * 10 ** e);
  }
  return ticks.filter((v) => v >= min && v <= max);
}

/** A whole number with its thousands apart. */
function whole(value) {
  return Math.round(value).toLocaleString("en");
}

/** An element; children are elements or text, never HTML. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** The colour that a CSS variable stands for in the present theme, as [r, g, b]. */
function colour(name) {
  const probe = element("span", { hidden: "" });
  document.body.append(probe);
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
  probe.remove();
  return found;
}

function css([r, g, b], alpha = 1) {
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}
