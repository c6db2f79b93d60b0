"use strict";
// Renews the parts of a page that change. Each such part has an id and `data-live`, the seconds
// between two looks; the page is loaded again, and the parts with the same ids are taken from it.
(() => {
  const live = [...document.querySelectorAll("[data-live]")];
  const news = document.getElementById("news");
  const freshness = document.getElementById("freshness");
  const pause = document.getElementById("pause");
  const state = { paused: false, loading: false, at: Date.now(), failed: false };

  const told = (root) => new Map(
    [...root.querySelectorAll("[data-news]")].map((e) => [e.dataset.news, e.textContent.trim()]),
  );

  function say(before, after) {
    const changes = [...after]
      .filter(([name, text]) => before.has(name) && before.get(name) !== text)
      .map(([name, text]) => `${name}: ${text}`);
    if (changes.length) news.textContent = changes.join("; ");
  }

  // What has the focus, what is chosen, and where a table was scrolled to, must survive the exchange.
  function place(root, element) {
    const all = [...root.querySelectorAll("a, button, summary, input, [tabindex]")];
    const at = all.indexOf(element);
    return at < 0 ? null : { at, href: element.getAttribute("href"), label: element.getAttribute("aria-label") };
  }

  function exchange(old, fresh) {
    if (old.innerHTML === fresh.innerHTML) return;
    const selection = window.getSelection();
    if (selection && !selection.isCollapsed && old.contains(selection.anchorNode)) return;
    const before = told(old);
    const focused = old.contains(document.activeElement) ? place(old, document.activeElement) : null;
    const chosen = new Set([...old.querySelectorAll("input:checked")].map((e) => e.name + e.value));
    const scrolled = [...old.querySelectorAll(".scroll, pre")].map((e) => [e.scrollLeft, e.scrollTop]);
    old.replaceChildren(...[...fresh.childNodes].map((node) => document.importNode(node, true)));
    [...old.querySelectorAll(".scroll, pre")].forEach((e, n) => {
      if (scrolled[n]) [e.scrollLeft, e.scrollTop] = scrolled[n];
    });
    for (const e of old.querySelectorAll("input[type=checkbox]")) e.checked = chosen.has(e.name + e.value);
    if (focused) {
      const all = [...old.querySelectorAll("a, button, summary, input, [tabindex]")];
      const same = all.find((e) => focused.href !== null && e.getAttribute("href") === focused.href
        && e.getAttribute("aria-label") === focused.label);
      const next = same || all[Math.min(focused.at, all.length - 1)];
      if (next) next.focus({ preventScroll: true });
    }
    say(before, told(old));
  }

  async function renew() {
    if (state.loading) return;
    state.loading = true;
    try {
      const answer = await fetch(window.location.href, { cache: "no-store" });
      if (answer.status === 401) {
        state.failed = true;
        freshness.textContent = "hopsgpu web was started again: open the URL that it printed.";
        return;
      }
      if (!answer.ok) throw new Error(answer.statusText);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const part of live) {
        const other = fresh.getElementById(part.id);
        if (!other) continue;
        exchange(part, other);
        if (other.dataset.live) part.dataset.live = other.dataset.live;
        else delete part.dataset.live;
      }
      // The form is of no use once the run has ended.
      const form = document.querySelector("details.cancel");
      if (form && !fresh.querySelector("details.cancel")) form.remove();
      document.title = fresh.title;
      document.getElementById("made").textContent = fresh.getElementById("made").textContent;
      state.at = Date.now();
      state.failed = false;
    } catch {
      state.failed = true;
      const clock = new Date(state.at).toLocaleTimeString();
      freshness.textContent = `No answer since ${clock}; tried again every few seconds.`;
    } finally {
      state.loading = false;
    }
  }

  function due() {
    const gaps = live.map((e) => Number(e.dataset.live)).filter((n) => n > 0);
    return gaps.length ? Math.min(...gaps) * 1000 : 0;
  }

  if (live.length) {
    document.getElementById("updates").hidden = false;
    pause.addEventListener("click", () => {
      state.paused = !state.paused;
      pause.setAttribute("aria-pressed", String(state.paused));
      document.documentElement.dataset.paused = state.paused ? "1" : "";
    });
    let last = Date.now();
    window.setInterval(() => {
      const gap = due();
      if (!gap) {
        document.getElementById("updates").hidden = true;
        return;
      }
      if (state.paused || document.hidden) return;
      if (!state.failed) freshness.textContent = `Renewed ${Math.round((Date.now() - state.at) / 1000)} s ago.`;
      if (Date.now() - last >= gap) {
        last = Date.now();
        renew();
      }
    }, 1000);
  }

  // A log that grows. What stands in the page is bounded, as is each answer.
  const log = document.querySelector("[data-follow]");
  if (log) {
    const follow = document.getElementById("follow");
    const most = 400000;
    follow.parentElement.hidden = false;
    log.scrollTop = log.scrollHeight;
    let end = Number(log.dataset.end);
    let asking = false;
    const ask = async () => {
      if (asking || document.hidden) return;
      asking = true;
      try {
        const answer = await fetch(`${log.dataset.follow}&from=${end}`, { cache: "no-store" });
        if (!answer.ok) return;
        const text = await answer.text();
        const until = Number(answer.headers.get("X-Log-End"));
        if (until > end) {
          log.append(text);
          if (log.textContent.length > most) {
            const kept = log.textContent.slice(-most / 2);
            log.textContent = kept.slice(kept.indexOf("\n") + 1);
          }
          end = until;
          if (follow.checked) log.scrollTop = log.scrollHeight;
        }
        if (answer.headers.get("X-Log-Grows") === "0") {
          window.clearInterval(timer);
          news.textContent = "The run has ended; the log is whole.";
        }
      } catch {
        // The server is away for a moment; the next look follows.
      } finally {
        asking = false;
      }
    };
    const timer = window.setInterval(ask, 2000);
  }
})();
