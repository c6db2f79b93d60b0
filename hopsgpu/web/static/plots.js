"use strict";
// Puts plots in which one can look closer in the place of the pictures of metrics.
(() => {
  const box = document.querySelector("[data-plots]");
  if (!box || !window.uPlot) return;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => (value === null || value === undefined ? "-" : Number(value.toPrecision(5)).toString());
  const percent = (value) => (value === null || value === undefined ? "-" : `${Math.round(value * 100)} %`);

  // A series is of a rank, or of a run that a comparison gives a letter.
  const nameOf = (one) => one.label || `rank ${one.rank}`;

  function joined(series) {
    const tables = series.map((one) => [one.points.map((p) => p[0]), one.points.map((p) => p[1])]);
    return tables.length ? window.uPlot.join(tables) : [[]];
  }

  // Steps and seconds are whole numbers; so are the distances of an axis' marks.
  const whole = [1, 2, 5].flatMap((n) => [...Array(13).keys()].map((k) => n * 10 ** k)).sort((a, b) => a - b);
  const isLog = box.dataset.log === "1";

  function options(series, width, shares) {
    const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const values = shares ? (u, splits) => splits.map(percent) : undefined;
    return {
      width,
      height: 200,
      scales: { x: { time: false }, y: shares ? { range: [0, 1] } : isLog ? { distr: 3 } : {} },
      axes: [
        { ...axis, size: 30, incrs: whole },
        { ...axis, size: 62, ...(values ? { values } : {}) },
      ],
      series: [
        { label: shares ? "second" : "step" },
        ...series.map((one, n) => ({
          label: nameOf(one),
          stroke: colour(`--c${(one.colour ?? n) % 8}`),
          width: n && !one.label ? 1 : 1.8,
          spanGaps: true,
          points: { show: one.points.length < 2 },
          value: (u, v) => (shares ? percent(v) : short(v)),
        })),
      ],
      cursor: { drag: { x: true, y: false } },
    };
  }

  function figure(name) {
    let found = [...box.querySelectorAll("figure")].find((f) => f.dataset.plot === name);
    if (!found) {
      found = document.createElement("figure");
      found.dataset.plot = name;
      const caption = document.createElement("figcaption");
      const bold = document.createElement("b");
      bold.textContent = name;
      const words = document.createElement("span");
      words.className = "faint";
      caption.append(bold, " ", words);
      found.append(caption);
      box.append(found);
    }
    return found;
  }

  function words(series, shares) {
    const values = series.flatMap((one) => one.points.map((p) => p[1]));
    if (!values.length) return "no number so far";
    if (shares) {
      return "mean: " + series.map((one) => {
        const all = one.points.map((p) => p[1]);
        return `rank ${one.rank} ${percent(all.reduce((a, b) => a + b, 0) / all.length)}`;
      }).join(", ");
    }
    const last = series[0].points[series[0].points.length - 1];
    const least = values.reduce((a, b) => Math.min(a, b));
    const most = values.reduce((a, b) => Math.max(a, b));
    return `last ${short(last[1])} at step ${last[0]} (rank ${series[0].rank}), from ${short(least)} to ${short(most)}`;
  }

  function draw(name, series, shares, caption) {
    if (!series.length) return;
    const place = figure(name);
    place.querySelector("figcaption .faint").textContent = caption || words(series, shares);
    const key = series.map(nameOf).join(",");
    const before = drawn.get(name);
    if (before && before.key === key) {
      before.series = series;
      before.plot.setData(joined(series));
      return;
    }
    if (before) before.plot.destroy();
    place.querySelector("img")?.remove();
    let chart = place.querySelector(".chart");
    if (!chart) {
      chart = document.createElement("div");
      chart.className = "chart";
      // The caption says it in words.
      chart.setAttribute("aria-hidden", "true");
      place.append(chart);
    }
    const plot = new window.uPlot(options(series, place.clientWidth, shares), joined(series), chart);
    drawn.set(name, { plot, key, series, shares, caption, place });
  }

  async function load() {
    if (document.hidden || document.documentElement.dataset.paused === "1") return;
    try {
      const answer = await fetch(box.dataset.plots, { cache: "no-store" });
      if (!answer.ok) return;
      const told = await answer.json();
      told.metrics.forEach((metric) => draw(metric.name, metric.series, false, metric.words));
      draw("GPU utilisation", told.gpus, true);
    } catch {
      // The pictures, or the plots so far, stay; the next look follows.
    }
  }

  function again() {
    for (const [name, one] of [...drawn]) {
      one.plot.destroy();
      drawn.delete(name);
      draw(name, one.series, one.shares, one.caption);
    }
  }

  dark.addEventListener("change", again);
  new ResizeObserver(() => {
    for (const one of drawn.values()) {
      const width = one.place.clientWidth;
      if (width && width !== one.plot.width) one.plot.setSize({ width, height: 200 });
    }
  }).observe(box);
  load();
  const every = Number(box.dataset.every);
  if (every) {
    const timer = window.setInterval(() => {
      load();
      if (!document.querySelector("#live[data-live]")) window.clearInterval(timer);
    }, every * 1000);
  }
})();
