"""The style sheet of the report, light and dark."""

STYLE = r"""
:root{--bg:#f7f7f5;--card:#fff;--ink:#1b1f24;--soft:#5d6670;--line:#e3e4e0;
--forward:#a9c3d6;--backward:#3d7ea6;--hook:#e0a33a;--wait:#d4505c;--rest:#c8ccd1;--hidden:#5fa88c;--sent:#3d7ea6;
--data:#8a6fb0;--side:#b8607d}
@media (prefers-color-scheme:dark){:root{--bg:#15181c;--card:#1d2126;--ink:#e8eaed;--soft:#9aa4af;--line:#31373e;
--forward:#5c7d94;--backward:#4b93c0;--hook:#d9a043;--wait:#e0636e;--rest:#59616a;--hidden:#4f9a7d;--sent:#4b93c0;
--data:#8f78b5;--side:#a85d77}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:36px 24px 60px}
header{display:flex;flex-wrap:wrap;gap:8px 40px;align-items:baseline;margin-bottom:18px}
h1{font-size:15px;font-weight:600;letter-spacing:.02em;color:var(--soft);margin:0}
header dl{display:flex;flex-wrap:wrap;gap:2px 22px;margin:0;font-size:13px}
header dl div{display:flex;gap:6px;min-width:0}
header dt{color:var(--soft)} header dd{margin:0;font-weight:500;min-width:0;overflow-wrap:anywhere}
.question{font-size:13px;font-weight:600;color:var(--soft);margin:0 0 2px}
.answer{font-size:16px;margin:0 0 14px;max-width:64em}
.question:first-of-type+.answer{font-size:24px;line-height:1.25;font-weight:650;letter-spacing:-.012em;max-width:40em}
.note{background:color-mix(in srgb,var(--hook) 14%,var(--card));border-left:3px solid var(--hook);padding:8px 14px;
border-radius:4px;font-size:14px;margin:0 0 22px}
code{font:.92em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:12px;margin-bottom:20px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:13px 14px}
.card .name{font-size:12.5px;color:var(--soft);line-height:1.3;min-height:2.6em}
.card .value{font-size:23px;font-weight:650;letter-spacing:-.02em;white-space:nowrap;font-variant-numeric:tabular-nums}
.card .what{font-size:12px;color:var(--soft)}
.hot .value{color:var(--wait)} .good .value{color:var(--hidden)}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:20px 22px 18px;margin:0 0 16px}
h2{font-size:17px;font-weight:650;margin:0} .sub{color:var(--soft);font-size:13.5px;margin:2px 0 14px}
i{font-style:normal}
.forward{background:var(--forward)} .backward{background:var(--backward)} .optimizer{background:var(--rest)}
.data{background:var(--data)} .validation,.save{background:var(--side)}
.skew{background:repeating-linear-gradient(45deg,var(--wait) 0 5px,
color-mix(in srgb,var(--wait) 72%,var(--card)) 5px 9px)}
.wait,.transfer,i.exposed{background:var(--wait)} i.hook{background:var(--hook)} i.hidden{background:var(--hidden)}
i.sent{background:var(--sent)} i.faint{background:color-mix(in srgb,var(--sent) 32%,var(--card))}
.timeline{position:relative;padding-top:24px;font-size:12px;--labels:140px}
.behind{position:absolute;top:0;bottom:0;left:var(--labels);right:12px}
.behind i{position:absolute;top:0;bottom:0} .behind .waiting{top:18px}
.behind .grid{border-left:1px solid var(--line);padding-left:4px}
.grid{font-size:11px;color:var(--soft);white-space:nowrap}
.waiting{background:color-mix(in srgb,var(--wait) 9%,transparent)}
.lane{display:flex;align-items:center;position:relative}
.lane>span{flex:0 0 var(--labels);padding-right:10px;text-align:right;color:var(--soft);white-space:nowrap}
.lane>div{position:relative;flex:1;height:72%;margin-right:12px}
.lane i{position:absolute;top:0;bottom:0;min-width:1px;border-radius:2px;line-height:33px}
.budget{padding-top:0} .budget i{line-height:22px;border-radius:0}
.lane i{overflow:hidden;text-align:center}
/* Only words that fit are shown: the others wrap below the box, the first one too, behind a space of no width. */
.lane i::before{content:"\200b"}
.lane .strip{top:auto;height:7px;border-radius:0}
.lane .backward,.lane .wait,.lane .transfer,.lane .skew,.lane .data{color:#fff;font-weight:550}
.key{display:flex;flex-wrap:wrap;gap:4px 22px;margin:8px 0 18px;font-size:13px;color:var(--soft)}
.key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:7px}
table{width:100%;border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums;margin-top:4px}
th{font-weight:500;color:var(--soft);text-align:left;padding:6px 10px 6px 0;font-size:12.5px;white-space:nowrap}
td{padding:6px 10px 6px 0;border-top:1px solid var(--line);white-space:nowrap}
td:nth-child(2){white-space:normal;overflow-wrap:anywhere}
.bars{width:150px} .bar{display:block;height:8px;border-radius:2px;margin:2px 0;}
@media (max-width:760px){section{overflow-x:auto} .timeline{min-width:640px}}
"""
