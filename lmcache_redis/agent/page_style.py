"""The style of the page of `--metrics`: no font, image or script from anywhere."""

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --line: #e3e6eb; --text: #1b2130; --soft: #626c80;
  --host: #0f9d8a; --disk: #d98a1f; --redis: #5b5bd6; --computed: #d5dae3;
  --good: #18794e; --good-back: #ddf3e4; --bad: #b3261e; --bad-back: #fbe4e2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #10131a; --card: #181c25; --line: #2a303c; --text: #e7eaf0; --soft: #97a1b4;
    --host: #25bfa9; --disk: #eaa545; --redis: #8b8bf5; --computed: #39404f;
    --good: #7ddba3; --good-back: #14301f; --bad: #ff9d94; --bad-back: #3d1815;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 28px 24px 40px; max-width: 1120px; background: var(--page);
  color: var(--text); font: 14px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
header { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: center; }
h1 { font-size: 20px; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 14px; margin: 0 0 10px; }
p { margin: 0; }
a { color: inherit; }
code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 12.5px; white-space: nowrap; }
.long { white-space: normal; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.pill { border-radius: 99px; padding: 2px 11px; font-weight: 600; font-size: 12.5px; }
.good { color: var(--good); } .pill.good { background: var(--good-back); }
.bad { color: var(--bad); } .pill.bad { background: var(--bad-back); }
.about { flex-basis: 100%; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 16px 18px; margin-top: 16px; overflow-x: auto; }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); }
.wide { grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); }
.number { font-size: 30px; font-weight: 650; line-height: 1.25; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; }
.bar { display: block; width: 100%; height: 14px; border-radius: 7px; margin-bottom: 12px; }
.small { height: 6px; border-radius: 3px; width: 130px; margin: 5px 0 0; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; list-style: none; margin: 0; padding: 0; }
.key { width: 10px; height: 10px; border-radius: 3px; margin-right: 7px; }
.host { fill: var(--host); } .disk { fill: var(--disk); } .redis { fill: var(--redis); }
.computed { fill: var(--computed); }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 12.5px; }
th, td { padding: 6px 16px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
tr:last-child td { border-bottom: 0; padding-bottom: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.hint { margin-top: 10px; }
footer { margin-top: 18px; color: var(--soft); font-size: 12.5px; }
@media (max-width: 560px) { .wide { grid-template-columns: 1fr; } body { padding: 16px 12px; } }
"""
