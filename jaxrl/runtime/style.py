"""The look of the report: one style sheet, light and dark, system fonts, no scripts. Knows only class names."""

CSS = """
:root { --bg: #fcfcfb; --card: #fff; --ink: #1c1d20; --quiet: #666b73; --rule: #e3e4e6; --hot: 213, 94, 0;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b8558f; --c4: #d99a00; --c5: #56b4e9; --c6: #6b6f76;
  --c7: #7a5195;
  --good: #00785a; --cut: #9a6400; --fault: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --bg: #15171a; --card: #1d2024; --ink: #e8e9eb; --quiet: #9aa0a8;
  --rule: #33373d; --hot: 240, 140, 50;
  --c0: #4aa8e0; --c1: #f08c3a; --c2: #35c79b; --c3: #de8fc0; --c4: #f0c04a; --c5: #8fd0f5; --c6: #9aa0a8;
  --c7: #b493d6;
  --good: #4fd0a4; --cut: #f0c04a; --fault: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto,
  "Helvetica Neue", Arial, sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1180px; margin: 0 auto; padding: 2.2rem 1.4rem 5rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.12rem; margin: 2.6rem 0 .8rem; padding-bottom: .3rem; border-bottom: 1px solid var(--rule); }
h4 { font-size: .78rem; font-weight: 600; margin: 0 0 .35rem; color: var(--quiet); letter-spacing: .02em; }
.outcome { font-size: 1.15rem; margin: 0 0 1.2rem; }
.quiet { color: var(--quiet); font-size: .86rem; }
code, pre { font: .82rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin-bottom: 1rem; }
.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: .6rem 1rem;
  flex: 1 1 9rem;
  color: var(--quiet); font-size: .84rem; }
.tiles b { display: block; font-size: 1.2rem; color: var(--ink); font-weight: 600; white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: .8rem .9rem .7rem; }
figcaption { font-size: .92rem; margin-bottom: .4rem; line-height: 1.35; }
figcaption .quiet { display: block; min-height: 1.2em; }
svg { display: block; width: 100%; height: auto; }
svg.bar { height: 30px; border-radius: 6px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.area ~ .grid { stroke: var(--ink); opacity: .13; }
.tick { fill: var(--quiet); font-size: 11px; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.s1 { stroke-dasharray: 6 8; } .line.s2 { stroke-dasharray: 1 7; }  /* what lies below stays in sight */
.line.raw { opacity: .3; stroke-width: 1.2; }
.dot.raw { opacity: .4; }
.dot, .area { fill: var(--c); }
.legend { display: flex; flex-wrap: wrap; gap: .15rem .9rem; margin-top: .45rem; font-size: .82rem;
  color: var(--quiet); }
.key::before { content: ""; display: inline-block; width: .7em; height: .7em; border-radius: 2px;
  background: var(--c);
  margin-right: .4em; }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); } .s3 { --c: var(--c3); }
.s4 { --c: var(--c4); } .s5 { --c: var(--c5); } .s6 { --c: var(--c6); } .s7 { --c: var(--c7); }
details { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; margin: .6rem 0;
  padding: 0 1rem; }
details[open] { padding-bottom: .9rem; }
summary { cursor: pointer; padding: .6rem 0; }
.label { font-weight: 600; margin-right: .3rem; }
.reward { margin-right: .3rem; }
.chip { border: 1px solid currentColor; border-radius: 99px; padding: 0 .55em; font-size: .78rem;
  margin-right: .3rem; }
.good { color: var(--good); } .cut { color: var(--cut); } .fault, .error, .odd { color: var(--fault); }
.turn { border-top: 1px solid var(--rule); padding: .7rem 0 .3rem; }
.turn pre { margin: 0 0 .4rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.masked { color: var(--quiet); }
.sampled { border-left: 3px solid var(--c0); padding-left: .7rem; }
.sampled span { border-radius: 2px; }
.p1 { background: rgba(var(--hot), .13); } .p2 { background: rgba(var(--hot), .25); }
.p3 { background: rgba(var(--hot), .38); }
.p4 { background: rgba(var(--hot), .52); } .p5 { background: rgba(var(--hot), .68); }
.scale { border: 1px solid var(--rule); border-radius: 3px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: .2rem 0; font-size: .82rem; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
details > pre { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; display: block; overflow-x: auto; }
th { color: var(--quiet); font-weight: 500; } th, td { text-align: right; padding: .16rem .8rem .16rem 0;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; width: 100%; }
@media print { details { break-inside: avoid; } }
"""
