"""The looks of the report, light and dark."""

STYLE = """
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
svg{display:block;width:100%;height:auto;margin-top:6px;overflow:visible}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--ink)}
svg .tick{fill:var(--soft);font-size:11px} svg .lane{fill:var(--soft)} svg .strong{font-weight:600}
svg .grid{stroke:var(--line);stroke-width:1} svg .median{stroke:var(--ink);stroke-width:1;stroke-dasharray:4 3}
svg .on-backward,svg .on-wait,svg .on-box{fill:#fff;font-weight:550} svg .on-hook{font-weight:550}
svg .faint{opacity:.75;font-weight:400}
svg .waiting{fill:var(--wait);opacity:.09} svg .most{fill:var(--wait);opacity:.28}
svg .forward{fill:var(--forward)} svg .backward{fill:var(--backward)} svg .rest{fill:var(--rest)}
svg .wait,svg .exposed{fill:var(--wait)} svg .hook{fill:var(--hook)} svg .hidden{fill:var(--hidden)}
svg .b0{fill:var(--b0)} svg .b1{fill:var(--b1)} svg .b2{fill:var(--b2)} svg .b3{fill:var(--b3)}
svg .b4{fill:var(--b4)} svg .b5{fill:var(--b5)}
.key{display:flex;flex-wrap:wrap;gap:4px 22px;margin:8px 0 18px;font-size:13px;color:var(--soft)}
.key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:7px}
i.hook{background:var(--hook)} i.hidden{background:var(--hidden)} i.exposed{background:var(--wait)}
i.sent{background:var(--sent)} i.faint{background:color-mix(in srgb,var(--sent) 32%,var(--card))}
i.b0,.dot.b0{background:var(--b0)} i.b1,.dot.b1{background:var(--b1)} i.b2,.dot.b2{background:var(--b2)}
i.b3,.dot.b3{background:var(--b3)} i.b4,.dot.b4{background:var(--b4)} i.b5,.dot.b5{background:var(--b5)}
.dot{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:7px}
table{width:100%;border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums;margin-top:4px}
th{font-weight:500;color:var(--soft);text-align:left;padding:6px 10px 6px 0;font-size:12.5px;white-space:nowrap}
td{padding:6px 10px 6px 0;border-top:1px solid var(--line);white-space:nowrap}
td:nth-child(2){white-space:normal;overflow-wrap:anywhere}
.bars{width:150px} .bar{display:block;height:8px;border-radius:2px;margin:2px 0;}
svg+table{margin-top:16px}
.legend dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 20px;font-size:13.5px;margin:10px 0 0}
.legend dt{font-weight:600} .legend dd{margin:0;color:var(--soft)}
@media (max-width:760px){.legend dl{display:block} section{overflow-x:auto} svg{min-width:640px}}
"""
