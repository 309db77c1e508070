/// The page's style sheet: readable on a phone, and dark if the reader's system is.
enum PageStyle {
    static let text = """
        :root { color-scheme: light dark; --text: #1c1e21; --muted: #5c6167; --back: #f6f7f8; --card: #fff; --line: #dfe2e5;
          --good: #1a7f4b; --bad: #c62828; --warn: #a85d00; --ok: #3b78c4; --stale: #d9822b; --other: #8c939b; --band: #cfe0d6; }
        @media (prefers-color-scheme: dark) {
          :root { --text: #e6e8ea; --muted: #a3aab1; --back: #14171a; --card: #1d2125; --line: #343a40;
            --good: #4cc38a; --bad: #ff7b72; --warn: #f0b35e; --ok: #6ea8fe; --stale: #f0a04b; --other: #6d757d; --band: #2c4437; }
        }
        * { box-sizing: border-box; }
        body { margin: 0 auto; padding: 1rem; max-width: 78rem; background: var(--back); color: var(--text);
          font: 15px/1.45 system-ui, sans-serif; }
        a { color: var(--ok); }
        h1 a, nav a { text-decoration: none; }
        header { display: flex; flex-wrap: wrap; gap: .25rem 1.2rem; align-items: baseline; }
        h1 { font-size: 1.3rem; margin: 0; }
        h1 a { color: var(--text); }
        h2 { font-size: 1rem; margin: 0 0 .6rem; overflow-wrap: anywhere; }
        .muted { color: var(--muted); }
        section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1rem; margin-top: .9rem; }
        section > p:last-child { margin-bottom: 0; }
        .attention { border-left: 5px solid var(--warn); }
        .attention.critical { border-left-color: var(--bad); }
        li.critical { font-weight: 600; }
        .fine { border-left: 5px solid var(--good); }
        section ul { margin: 0; padding-left: 1.1rem; }
        .attention li { margin: .35rem 0; overflow-wrap: anywhere; }
        code { font: 13px/1.4 ui-monospace, monospace; background: var(--back); padding: .1rem .3rem; border-radius: 4px;
          overflow-wrap: anywhere; user-select: all; }
        pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
        dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: .7rem 1rem; margin: 0; }
        dl > div { display: flex; flex-direction: column; }
        dt { flex: 1; color: var(--muted); font-size: .85rem; }
        dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
        dd.asof { color: var(--muted); font-size: 12px; }
        table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
        th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-top: 1px solid var(--line); vertical-align: middle; }
        th { font-weight: 600; font-size: .85rem; color: var(--muted); border-top: 0; }
        td { overflow-wrap: anywhere; }
        td.number, th.number { text-align: right; }
        td.number { white-space: nowrap; }
        svg { display: block; max-width: 100%; }
        figure { margin: 0 0 .8rem; }
        figcaption { font-size: .85rem; font-weight: 600; margin-bottom: .4rem; }
        .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: .6rem 1.6rem; }
        .plot { display: grid; grid-template: 10rem auto / max-content 1fr; gap: .2rem .5rem; font-size: 12px; color: var(--muted); }
        .plot svg { width: 100%; height: 100%; border-bottom: 1px solid var(--line); }
        .y { display: flex; flex-direction: column; justify-content: space-between; text-align: right; }
        .x { grid-column: 2; display: flex; justify-content: space-between; }
        .legend { margin: .3rem 0 0; font-size: 13px; color: var(--muted); }
        .trend { fill: none; stroke: var(--ok); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
        .axis { stroke: var(--line); vector-effect: non-scaling-stroke; }
        .s200 { fill: var(--ok); background: var(--ok); }
        .s410 { fill: var(--stale); background: var(--stale); }
        .rest { fill: var(--other); background: var(--other); }
        .high { fill: var(--bad); background: var(--bad); }
        .band { fill: var(--band); background: var(--band); }
        .track { fill: var(--line); }
        .key { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin: 0 .2rem 0 .5rem; }
        .campaign { border-top: 1px solid var(--line); padding: .6rem 0; }
        .campaign:first-of-type { border-top: 0; padding-top: 0; }
        .campaign p { margin: .15rem 0; overflow-wrap: anywhere; }
        .bar { width: 100%; height: .7rem; border-radius: 4px; }
        .figures { display: flex; flex-wrap: wrap; gap: 0 1.2rem; font-variant-numeric: tabular-nums; margin: .3rem 0; }
        .state { display: inline-block; border: 1px solid var(--other); border-radius: 99px; padding: 0 .6rem; font-size: .85rem; font-weight: 600; }
        .state.running { border-color: var(--ok); color: var(--ok); }
        .state.ended { border-color: var(--good); color: var(--good); }
        .state.paused, .state.cancelled { border-color: var(--warn); color: var(--warn); }
        label { display: block; margin-bottom: .3rem; }
        .search { display: flex; gap: .5rem; }
        input { flex: 1; min-width: 0; font: 14px ui-monospace, monospace; padding: .4rem .5rem; }
        button { font: inherit; padding: .2rem .7rem; }
        @media (max-width: 40rem) {
          body { padding: .6rem; }
          thead { display: none; }
          tr { display: block; border-top: 1px solid var(--line); padding: .35rem 0; }
          td, td.number { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0; text-align: right; white-space: normal; }
          td::before { content: attr(data-label); color: var(--muted); text-align: left; flex: none; }
        }
        """
}
