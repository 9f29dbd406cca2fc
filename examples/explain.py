"""Why is a GNN slow, and would more hardware help? Two questions, two calls, two pages.

python examples/explain.py            # a two-layer GAT on Cora
python examples/explain.py sage       # another model: gcn, sage, gin, gat, edgeconv, ...
"""

import sys

import stretto.analyze
import stretto.profile
from stretto import datasets
from stretto.observe.models import as_data, make

name = sys.argv[1] if len(sys.argv) > 1 else "gat"
data = as_data(datasets.load_graph("cora"))
model = make(name, data.x.size(1), 64, 7)

# 1. Where does the time go? Every op, its module, what bounds it; then what to do about it, done and measured.
profile = stretto.profile(model, data)
print(profile)
for row in profile.recommend():
    print(f"  {row['site']}, {row['now']}: {row['advice']} ({row['reason']}), saves {row['saves_ms']:.1f} ms a step")
print("  applied:", profile.apply()["reason"])
profile.to_html("profile.html")

# 2. Work, depth, memory and communication: predicted from the trace of a small probe, never run at full size.
report = stretto.analyze(make(name, data.x.size(1), 64, 7), data, procs=[1, 2, 4, 8, 16])
print(report.explain())
for check in report.validate():
    known = [f"{how} {check[how]:.4g}" for how in ("predicted", "counted", "measured") if check[how] is not None]
    print(f"  {check['what']} [{check['unit']}]: {', '.join(known)}")
report.to_html("analysis.html")
print("see profile.html and analysis.html")
