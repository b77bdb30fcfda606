"""The look of every page: system type, one accent, light and dark, no decoration that carries no information."""

from __future__ import annotations

CSS = """
:root {
  --ink: #1c2024; --soft: #5f6772; --line: #dfe3e8; --ground: #ffffff; --raised: #f6f7f9; --accent: #1f5fbf;
  --good: #1a7f4b; --bad: #b3261e; --doubt: #8a5a00; --wait: #b9c2cc; --first: #6b9be0; --rest: #1f5fbf;
  --s0: #1f5fbf; --s1: #0f8a8a; --s2: #8a5a00; --s3: #7a3fb0; --s4: #4a5560;
  color-scheme: light dark;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e7eb; --soft: #98a1ad; --line: #2e343c; --ground: #14171a; --raised: #1c2025; --accent: #82b1ff;
    --good: #5bc98c; --bad: #ff8a80; --doubt: #e6b450; --wait: #4a535e; --first: #3f6fb5; --rest: #82b1ff;
    --s0: #82b1ff; --s1: #5cd0d0; --s2: #e6b450; --s3: #c9a0f0; --s4: #aab4c0;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } .head { display: none; } }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main, header.page, nav, footer { max-width: 66rem; margin: 0 auto; padding: 0 1.25rem; }
header.page { padding-top: 2.25rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; font-weight: 650; letter-spacing: -0.01em;
  overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 0.75rem; font-weight: 650; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.25rem; font-weight: 600; }
p { margin: 0.4rem 0 0.9rem; max-width: 44rem; }
a { color: var(--accent); text-underline-offset: 0.15em; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.skip { position: absolute; left: -999rem; }
.skip:focus { left: 1rem; top: 1rem; background: var(--ground); padding: 0.5rem 0.75rem; }
.kicker { color: var(--soft); margin: 0 0 0.35rem; font-size: 0.9rem; }
.lead { font-size: 1.1rem; margin-top: 0.75rem; }
.soft { color: var(--soft); }
nav ul { list-style: none; margin: 1rem 0 0; padding: 0.6rem 0; display: flex; flex-wrap: wrap; gap: 0.25rem 1.1rem;
  border-block: 1px solid var(--line); font-size: 0.9rem; }
section { margin: 2.5rem 0; scroll-margin-top: 1rem; }
.banner { border-left: 4px solid var(--doubt); background: var(--raised); padding: 0.7rem 1rem; margin: 1.1rem 0 0; }
.banner.void { border-color: var(--bad); }
.banner p { margin: 0.15rem 0; max-width: none; }
.verdict { font-weight: 600; white-space: nowrap; }
.verdict.pass { color: var(--good); } .verdict.fail, .verdict.void { color: var(--bad); }
.verdict.inconclusive { color: var(--doubt); } .verdict.not-declared { color: var(--soft); font-weight: 400; }
.symbol { display: inline-block; min-width: 1em; text-align: center; }
.scroll { overflow-x: auto; margin: 0.5rem 0 1.25rem; background:
  linear-gradient(90deg, var(--ground) 40%, transparent) 0 0 / 2.5rem 100% no-repeat local,
  linear-gradient(270deg, var(--ground) 40%, transparent) 100% 0 / 2.5rem 100% no-repeat local,
  linear-gradient(90deg, var(--line), transparent) 0 0 / 0.75rem 100% no-repeat scroll,
  linear-gradient(270deg, var(--line), transparent) 100% 0 / 0.75rem 100% no-repeat scroll; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
caption { width: min(100%, calc(100vw - 2.5rem)); text-align: left; color: var(--soft); font-size: 0.9rem;
  padding: 0 0 0.4rem; }
caption.quiet { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th, td { text-align: left; padding: 0.4rem 0.7rem; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
tbody th { font-weight: 500; }
tbody th:not(.group) { white-space: nowrap; }
tr > :first-child { padding-left: 0; } tr > :last-child { padding-right: 0; }
th.num, td.num { text-align: right; white-space: nowrap; }
td.wide { min-width: 14rem; } td.wide code { overflow-wrap: anywhere; } .nowrap { white-space: nowrap; }
.compact td.num .soft { display: inline-block; white-space: normal; max-width: 7rem; }
summary { cursor: pointer; margin: 0.5rem 0; }
th.group { padding-top: 1rem; font-weight: 650; }
dl { margin: 0.5rem 0 1.25rem; display: grid;
  grid-template-columns: repeat(auto-fill, minmax(24rem, 1fr)); gap: 0 2rem; }
dl > div { display: grid; grid-template-columns: 8.5rem 1fr; gap: 0.75rem; padding: 0.4rem 0;
  border-bottom: 1px solid var(--line); }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 0.75rem 0 1.5rem; }
figcaption { color: var(--soft); font-size: 0.9rem; margin-top: 0.3rem; max-width: 44rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 0 2rem; }
.charts figure { min-width: 0; }
.plot { min-height: 17rem; }
.key { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; list-style: none; margin: 0.3rem 0;
  padding: 0; font-size: 0.9rem; }
.swatch { display: inline-block; width: 0.8rem; height: 0.8rem; margin-right: 0.4rem; vertical-align: -0.08rem; }
.key li { overflow-wrap: anywhere; }
.charts .key { font-size: 0.82rem; gap: 0.1rem 1rem; }
.key .sample { display: inline-block; width: 1.75rem; height: 0.875rem; margin-right: 0.35rem;
  vertical-align: -0.1rem; }
.sample .mark { fill: currentColor; stroke: currentColor; stroke-width: 1.5; }
.sample.hollow .mark { fill: none; }
.sample .line { fill: none; stroke: currentColor; stroke-width: 2; }
.series-0 { color: var(--s0); } .series-1 { color: var(--s1); } .series-2 { color: var(--s2); }
.series-3 { color: var(--s3); } .series-4 { color: var(--s4); } .sample.ink { color: var(--ink); }
.sample.bad { color: var(--bad); }
.swatch.edge { background: color-mix(in srgb, var(--ink) 12%, transparent); border-left: 2px dashed var(--ink); }
svg { display: block; width: 100%; font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); }
.wait { fill: var(--wait); background: var(--wait); } .first { fill: var(--first); background: var(--first); }
.rest { fill: var(--rest); background: var(--rest); } .failed { fill: var(--bad); background: var(--bad); }
.cut { fill: var(--doubt); background: var(--doubt); }
.rule { stroke: var(--line); }
pre { background: var(--raised); border: 1px solid var(--line); padding: 0.9rem 1rem; overflow-x: auto;
  font-size: 0.86rem; line-height: 1.5; margin: 0.5rem 0; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { font-size: 0.9em; }
.controls { display: flex; flex-wrap: wrap; align-items: center; gap: 0.5rem 1.4rem; margin: 1rem 0;
  font-size: 0.92rem; }
.controls .quiet { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.clock { margin-left: 0.9rem; font-variant-numeric: tabular-nums; }
button, select, input { font: inherit; color: inherit; background: var(--raised); border: 1px solid var(--line);
  border-radius: 4px; padding: 0.2rem 0.6rem; }
button { margin-right: 0.4rem; cursor: pointer; } button:hover { border-color: var(--accent); }
input[type="range"] { padding: 0; vertical-align: middle; accent-color: var(--accent); width: 9rem; }
.lanes { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.25rem 2rem; }
.lanes label { font-size: 0.92rem; } .lanes select { max-width: 100%; } .lanes > div { min-width: 0; }
.lanes output { display: block; height: 9rem; overflow-y: auto; margin: 0.5rem 0; padding: 0.5rem 0.75rem;
  border: 1px solid var(--line); border-left: 4px solid var(--line); background: var(--raised); }
.lanes .stalled output { border-left-color: var(--bad); }
.lanes dl { grid-template-columns: 1fr; } .lanes dl > div { grid-template-columns: 14rem 1fr; padding: 0.2rem 0; }
.lanes svg path, .lanes svg line { vector-effect: non-scaling-stroke; }
.shown { fill: none; stroke: var(--accent); stroke-width: 2; } .head { stroke: var(--ink); }
.reader { stroke: var(--soft); stroke-dasharray: 5 4; } .stall { fill: var(--bad); opacity: 0.18; }
fieldset { border: 1px solid var(--line); margin: 1.25rem 0; padding: 0.75rem 1rem; font-size: 0.92rem; }
fieldset:disabled { opacity: 0.55; }
.inputs { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 0.5rem 1.5rem; }
.inputs label { display: flex; justify-content: space-between; align-items: center; gap: 0.75rem; }
.inputs input { width: 6rem; }
footer { padding-block: 0 3rem; color: var(--soft); font-size: 0.9rem; }
@media (max-width: 40rem) {
  body { font-size: 15px; } h1 { font-size: 1.45rem; } header.page { padding-top: 1.25rem; }
  dl { grid-template-columns: 1fr; } dl > div { grid-template-columns: 7.5rem 1fr; }
  section { margin: 2rem 0; } td.wide { min-width: 7rem; }
  tr:has(> td.wide) > th { white-space: normal; } th, td { padding-inline: 0.45rem; }
  td.num .soft { display: inline-block; white-space: normal; max-width: 4.8rem; font-size: 0.8em; line-height: 1.35; }
}
@media print { nav, .skip { display: none; } section { break-inside: avoid; } }
"""
