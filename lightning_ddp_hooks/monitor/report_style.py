"""The style sheet of the report, light and dark."""

STYLE = r"""
:root{--bg:#f7f7f5;--card:#fff;--ink:#1b1f24;--soft:#5d6670;--line:#e3e4e0;
--forward:#a9c3d6;--backward:#3d7ea6;--hook:#e0a33a;--wait:#d4505c;--rest:#c8ccd1;--hidden:#5fa88c;--sent:#3d7ea6;
--b0:#3d7ea6;--b1:#5fa88c;--b2:#c98b3c;--b3:#8a6fb0;--b4:#b8607d;--b5:#6f8a3f}
@media (prefers-color-scheme:dark){:root{--bg:#15181c;--card:#1d2126;--ink:#e8eaed;--soft:#9aa4af;--line:#31373e;
--forward:#5c7d94;--backward:#4b93c0;--hook:#d9a043;--wait:#e0636e;--rest:#59616a;--hidden:#4f9a7d;--sent:#4b93c0;
--b0:#35719a;--b1:#43836c;--b2:#9c6a2b;--b3:#725a97;--b4:#96506a;--b5:#5a7232}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:36px 24px 60px}
header{display:flex;flex-wrap:wrap;gap:8px 40px;align-items:baseline;margin-bottom:18px}
h1{font-size:15px;font-weight:600;letter-spacing:.02em;color:var(--soft);margin:0}
header dl{display:flex;flex-wrap:wrap;gap:2px 22px;margin:0;font-size:13px}
header dl div{display:flex;gap:6px;min-width:0}
header dt{color:var(--soft)} header dd{margin:0;font-weight:500;min-width:0;overflow-wrap:anywhere}
.verdict{font-size:27px;line-height:1.25;font-weight:650;letter-spacing:-.012em;margin:0 0 10px;max-width:36em}
.advice{color:var(--soft);margin:0 0 26px;max-width:62em;font-size:16px}
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
.forward{background:var(--forward)} .backward{background:var(--backward)} .rest{background:var(--rest)}
.wait,i.exposed{background:var(--wait)} i.hook{background:var(--hook)} i.hidden{background:var(--hidden)}
i.sent{background:var(--sent)} i.faint{background:color-mix(in srgb,var(--sent) 32%,var(--card))}
.b0{background:var(--b0)} .b1{background:var(--b1)} .b2{background:var(--b2)}
.b3{background:var(--b3)} .b4{background:var(--b4)} .b5{background:var(--b5)}
.timeline{position:relative;padding-top:24px;font-size:12px;--labels:140px}
.behind{position:absolute;top:0;bottom:0;left:var(--labels);right:12px}
.behind i{position:absolute;top:0;bottom:0} .behind .waiting{top:18px}
.behind .grid{border-left:1px solid var(--line);padding-left:4px}
.grid,.ends{font-size:11px;color:var(--soft);white-space:nowrap}
.waiting,.most{background:color-mix(in srgb,var(--wait) 9%,transparent)}
.lane{display:flex;align-items:center;position:relative}
.lane>span{flex:0 0 var(--labels);padding-right:10px;text-align:right;color:var(--soft);white-space:nowrap}
.lane>div{position:relative;flex:1;height:72%;margin-right:12px}
.lane i{position:absolute;top:0;bottom:0;min-width:1px;border-radius:2px;line-height:33px}
.lane i,.budget i,.map i{overflow:hidden;text-align:center}
/* Only words that fit are shown: the others wrap below the box, the first one too, behind a space of no width. */
.lane i::before,.budget i::before{content:"\200b"}
.lane .strip{top:auto;height:7px;border-radius:0}
.lane .backward,.lane .wait,.budget .backward,.budget .wait,.map i{color:#fff;font-weight:550}
.budget{display:flex;gap:1px;height:26px;line-height:26px;font-size:12px} .budget i{border-radius:3px}
.columns{position:relative;display:flex;align-items:stretch;height:134px;margin:22px 0 0 62px;gap:1px}
.columns>i{position:absolute;left:0;right:0;border-top:1px solid var(--line);height:0;text-indent:-62px;line-height:0}
.columns .median{border-top:1px dashed var(--ink);z-index:1}
.columns>div{position:relative;flex:1;max-width:32px} .columns div i{position:absolute;bottom:0;left:10%;right:10%}
.columns .most{background:color-mix(in srgb,var(--wait) 28%,transparent)}
.columns .beyond::before{content:"\2191";position:absolute;top:-16px;left:30%;font-size:11px;color:var(--soft)}
.ends{display:flex;justify-content:space-between;margin:4px 0 0 62px}
.map{display:flex;flex-direction:column;height:300px;margin-top:6px;font-size:12px} .map div{display:flex;min-height:0}
.map i{box-shadow:inset 0 0 0 .5px var(--card);padding:4px 2px 0;min-width:0;text-overflow:ellipsis;white-space:nowrap}
.map .rest{color:var(--ink)}
.key{display:flex;flex-wrap:wrap;gap:4px 22px;margin:8px 0 18px;font-size:13px;color:var(--soft)}
.key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:7px}
.dot{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:7px}
table{width:100%;border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums;margin-top:4px}
th{font-weight:500;color:var(--soft);text-align:left;padding:6px 10px 6px 0;font-size:12.5px;white-space:nowrap}
td{padding:6px 10px 6px 0;border-top:1px solid var(--line);white-space:nowrap}
td:nth-child(2){white-space:normal;overflow-wrap:anywhere}
.bars{width:150px} .bar{display:block;height:8px;border-radius:2px;margin:2px 0;}
.map+table{margin-top:16px}
.legend dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 20px;font-size:13.5px;margin:10px 0 0}
.legend dt{font-weight:600} .legend dd{margin:0;color:var(--soft)}
@media (max-width:760px){.legend dl{display:block} section{overflow-x:auto} .timeline,.columns,.map{min-width:640px}}
"""
