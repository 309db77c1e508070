/// The page's style sheet: readable on a phone, and dark if the reader's system is.
enum PageStyle {
    static let text = """
        :root { color-scheme: light dark; --text: #1c1e21; --muted: #62676d; --back: #f6f7f8; --card: #fff; --line: #dfe2e5;
          --good: #1a7f4b; --bad: #c62828; --warn: #a85d00; --ok: #3b78c4; --stale: #d9822b; --other: #8c939b; }
        @media (prefers-color-scheme: dark) {
          :root { --text: #e6e8ea; --muted: #9aa1a9; --back: #14171a; --card: #1d2125; --line: #343a40;
            --good: #4cc38a; --bad: #ff7b72; --warn: #f0b35e; --ok: #6ea8fe; --stale: #f0a04b; --other: #6d757d; }
        }
        * { box-sizing: border-box; }
        body { margin: 0 auto; padding: 1rem; max-width: 64rem; background: var(--back); color: var(--text);
          font: 15px/1.45 system-ui, sans-serif; }
        header { display: flex; flex-wrap: wrap; gap: .25rem 1rem; align-items: baseline; }
        h1 { font-size: 1.3rem; margin: 0; }
        h2 { font-size: 1rem; margin: 0 0 .6rem; }
        .muted { color: var(--muted); }
        section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1rem; margin-top: .9rem; }
        .attention { border-left: 5px solid var(--warn); }
        .attention.critical { border-left-color: var(--bad); }
        li.critical { font-weight: 600; }
        .fine { border-left: 5px solid var(--good); }
        .attention ul { margin: 0; padding-left: 1.1rem; }
        .attention li { margin: .35rem 0; overflow-wrap: anywhere; }
        code { font: 13px/1.4 ui-monospace, monospace; background: var(--back); padding: .1rem .3rem; border-radius: 4px;
          overflow-wrap: anywhere; user-select: all; }
        dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .7rem 1rem; margin: 0; }
        dt { color: var(--muted); font-size: .85rem; }
        dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
        .scroll { overflow-x: auto; }
        table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
        th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-top: 1px solid var(--line); vertical-align: middle; }
        th { font-weight: 600; font-size: .85rem; color: var(--muted); border-top: 0; white-space: nowrap; }
        td.number, th.number { text-align: right; white-space: nowrap; }
        td.name { overflow-wrap: anywhere; min-width: 9rem; }
        svg { display: block; max-width: 100%; }
        svg text { fill: var(--muted); font: 11px system-ui, sans-serif; }
        .trend { fill: none; stroke: var(--ok); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
        .axis { stroke: var(--line); }
        .s200 { fill: var(--ok); background: var(--ok); }
        .s410 { fill: var(--stale); background: var(--stale); }
        .rest { fill: var(--other); background: var(--other); }
        .legend { white-space: nowrap; }
        .key { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin: 0 .3rem 0 .8rem; }
        @media (max-width: 32rem) { body { padding: .6rem; } }
        """
}
