#!/usr/bin/env python3
"""Fits the rule for workspaces of convolutions (crates/shadow/core/cudnn/convolutions.rs) to measurements.

usage: tools/shadow/fit_convolutions.py FOLDER   conv1.csv to conv6.csv of measure_convolutions.py; 5 and 6 are held out.
Needs numpy, pandas and scikit-learn. Writes the tables of convolutions.rs between its BEGIN and END marks and prints the
accuracy on the files that are held out.

1. A formula is copies (which tensors are copied) plus partial sums (a constant, a multiple of the filter in fp32, or
   output tiles times splits). Of some thousand formulas per operation the best 48 are chosen greedily by cost.
2. Each measured row is labelled with its cheapest formula; one decision tree per operation and layout is grown.
3. The formula of each leaf is the one with the smallest summed cost over the rows of the leaf."""
import os, sys
import numpy as np, pandas as pd
from sklearn.tree import DecisionTreeClassifier

HERE = os.path.dirname(os.path.abspath(__file__))
FORMULAS, LEAVES = 48, {0: 90, 1: 85, 2: 130}
CONSTANTS = [256, 4096, 16384, 65536, 131072, 262144, 524288, 1048576, 1572864, 2097152, 2621440, 3145728, 3932160, 4194304,
             5242880, 6291456, 7077888, 7340032, 7864320, 8388608, 10485760, 12582912, 14680064, 15728640, 16777216,
             20971520, 25165824, 33554432, 50331648, 67108864]
COPIES = ['none', 'w', 'x', 'y', 'xw', 'yw', 'xy', 'xyw', 'XW', 'YW', 'XY', 'XYW', 'needed']
CONST, MULTIPLE, TILES, SPLITS, FILTERS = range(5)  # kinds of partial sums

ceil = lambda a, b: -(-a // b)
up = lambda a, b: ceil(a, b) * b

class Rows: pass

def rows(d):
    q = Rows()
    g = lambda name: d[name].values.astype(np.int64)
    q.n, q.c, q.k, q.kernel, q.stride, q.padding, q.dilation, q.groups, q.dims, q.size = map(
        g, ['n', 'c', 'k', 'kernel', 'stride', 'padding', 'dilation', 'groups', 'dims', 'size'])
    q.half = (d.dtype != 'float32').values
    q.last = (d.layout == 'nhwc').values
    q.op = d.op.map({'forward': 0, 'data': 1, 'weight': 2}).values
    q.o = (q.size + 2 * q.padding - q.dilation * (q.kernel - 1) - 1) // q.stride + 1
    q.S, q.O, q.R = q.size ** q.dims, q.o ** q.dims, q.kernel ** q.dims
    q.cg, q.kg = q.c // q.groups, q.k // q.groups
    e = np.where(q.half, 2, 4).astype(np.int64)
    pad = np.where(q.half, 8, 4)
    cp, kp = up(q.cg, pad), up(q.kg, pad)
    block = np.maximum(4, (2 ** np.ceil(np.log2(np.maximum(q.cg, q.kg)))).astype(np.int64))  # grouped: square blocks
    cp, kp = np.where(q.groups > 1, block, cp), np.where(q.groups > 1, block, kp)
    q.x, q.y, q.w = q.n * q.c * q.S * e, q.n * q.k * q.O * e, q.k * q.cg * q.R * e
    q.X, q.Y, q.W = q.n * cp * q.groups * q.S * e, q.n * kp * q.groups * q.O * e, kp * q.groups * cp * q.R * e
    ca, ka, first = cp != q.cg, kp != q.kg, ~q.last
    q.needed = q.X * (first | ca) + q.Y * ((first & (q.O > 1)) | ka) + q.W * ((first & (q.R > 1)) | ca | ka)
    q.w32 = q.w * 4 // e
    q.M = np.select([q.op == 0, q.op == 1], [q.n * q.O, q.n * q.S], q.kg)
    q.N = np.where(q.op == 0, q.kg, q.cg)
    q.T = np.where(q.op == 2, q.R, 1)
    q.ws, q.xyw = g('workspaces'), q.x + q.y + q.w
    return q

def pick(q, i):
    z = Rows()
    for name, value in q.__dict__.items():
        setattr(z, name, value[i])
    return z

def copies(q, name):
    if name == 'none': return 0 * q.x
    if name == 'needed': return q.needed
    return sum(getattr(q, letter) for letter in name)

def sums(q, f):
    kind, a, b, flat, unit, p = f
    if kind == CONST: return 0 * q.x + a
    if kind == MULTIPLE: return a * q.w32
    t = up(ceil(q.M, a) * (ceil(q.N * q.T, b) if flat else q.T * ceil(q.N, b)), unit) * q.groups
    if kind == TILES: return t * p * a * b * 4
    s = np.maximum(p // t, 1)
    return s * t * a * b * 4 if kind == SPLITS else s * q.w32

def candidates(op):
    yield (CONST, 0, 0, 0, 0, 0)
    for c in CONSTANTS: yield (CONST, c, 0, 0, 0, 0)
    for j in list(range(1, 17)) + [20, 24, 28, 32, 40, 48, 64, 96, 128] if op == 2 else [1, 2]: yield (MULTIPLE, j, 0, 0, 0, 0)
    for a in (64, 128, 192, 256):
        for b in (32, 64, 128, 192, 256):
            for flat in ((0, 1) if op == 2 else (0,)):
                for unit in (1, 8):
                    for p in (132, 120):
                        yield (SPLITS, a, b, flat, unit, p)
                        if op == 2: yield (FILTERS, a, b, flat, unit, p)
                    for p in (1, 2, 3, 4): yield (TILES, a, b, flat, unit, p)

def total(a, b):
    v = a + b
    return np.where(v > 0, v + 16, 0)

def cost(pred, q):
    err = np.abs(pred - q.ws)
    return (0.3 * (err > 1100) + 0.3 * ((pred == 0) != (q.ws == 0)) + 2 * np.minimum(err / np.maximum(q.xyw, 1 << 18), 1.5)).astype(np.float32)

def choose(q, train, op):
    i = np.where((q.op == op) & train)[0]
    z = pick(q, np.random.RandomState(1).choice(i, min(5000, len(i)), replace=False))
    names, costs = [], []
    parts = [(f, sums(z, f)) for f in candidates(op)]
    for l in COPIES:
        L = copies(z, l)
        for f, s in parts:
            c = cost(total(L, s), z)
            if (c < .3).sum() >= 8:
                names.append((l, f)); costs.append(c)
    costs = np.array(costs)
    best, chosen = np.full(len(z.x), 3.6, np.float32), []
    for _ in range(FORMULAS):
        b = int(np.maximum(best - costs, 0).sum(1).argmax())
        chosen.append(names[b]); best = np.minimum(best, costs[b])
    return chosen

def alignment(v): return np.where(v % 8 == 0, 0, np.where(v % 4 == 0, 1, 2))

def features(q):
    t = lambda m, n: ceil(m, 128) * ceil(n, 128)
    f = [q.half, alignment(q.cg), alignment(q.kg), q.c, q.k, q.cg, q.kg, q.n, q.groups, q.dims, q.kernel, q.stride, q.padding,
         q.dilation, q.size, q.o, q.S, q.O, q.R, q.n * q.O, q.n * q.S, q.cg * q.R, q.kg * q.R, q.x >> 10, q.y >> 10, q.w >> 10,
         q.c * q.k >> 4, q.n * q.O * q.k * q.cg * q.R >> 20, t(q.n * q.O, q.k), t(q.n * q.S, q.c), t(q.k, q.c * q.R),
         np.minimum(q.y * 16 // q.x, 100000), np.minimum(q.w * 16 // (q.x + q.y), 100000), q.stride >= q.kernel]
    return np.stack([np.asarray(v).astype(np.int64) for v in f], 1)

def report(pred, z, tag):
    err = pred - z.ws
    rel = err / z.xyw
    pool = lambda v: np.sign(v) + (v >= 1 << 20)
    return dict(tag=tag, rows=len(err), exact512=(up(pred, 512) == up(z.ws, 512)).mean(), within2k=(abs(err) <= 2048).mean(),
                below5=(abs(rel) < .05).mean(), mean=rel.mean(), median=np.median(rel), bulk=err.sum() / z.xyw.sum(),
                absbulk=abs(err).sum() / z.xyw.sum(), pool=(pool(pred) == pool(z.ws)).mean(), mib=((pred >= 1 << 20) == (z.ws >= 1 << 20)).mean())

def main():
    template = output = os.path.join(HERE, '../../crates/shadow/core/cudnn/convolutions.rs')
    d = pd.concat([pd.read_csv(os.path.join(sys.argv[1], f'conv{i}.csv')).assign(file=i) for i in range(1, 7)], ignore_index=True)
    train, q = (d.file <= 4).values, rows(d)
    table, tree, roots, results, held = [], [], [], [], np.full(len(d), -1)
    for op in range(3):
        chosen = choose(q, train, op)
        for last in (False, True):
            m = (q.op == op) & (q.last == last)
            it, ie = np.where(m & train)[0], np.where(m & ~train)[0]
            zt, ze = pick(q, it), pick(q, ie)
            costs = np.stack([cost(total(copies(zt, l), sums(zt, f)), zt) for l, f in chosen], 1)
            weight = np.clip(np.log2(zt.xyw / 65536.) / 4, 0.3, 2) * np.where(zt.groups > 1, 2, 1)  # few grouped rows
            F = features(zt)
            t = DecisionTreeClassifier(max_leaf_nodes=LEAVES[op], min_samples_leaf=5, criterion='entropy', random_state=0)
            t.fit(F, costs.argmin(1), sample_weight=weight)
            leaf, best = t.apply(F), {}
            weight2 = weight * np.clip(zt.xyw / 1e7, 0.5, 10) ** 0.5
            for l in np.unique(leaf):
                best[l] = int((costs[leaf == l] * weight2[leaf == l, None]).sum(0).argmin())
            T = t.tree_
            def emit(node):  # preorder; a subtree whose leaves agree becomes one leaf
                if T.children_left[node] < 0: return [('leaf', best[node])]
                a, b = emit(T.children_left[node]), emit(T.children_right[node])
                if len(a) == 1 and a == b: return a
                return [('node', int(T.feature[node]), int(np.floor(T.threshold[node])), a, b)]
            def flat(n):
                n = n[0]
                if n[0] == 'leaf':
                    f = chosen[n[1]]
                    if f not in table: table.append(f)
                    return [100 + table.index(f)]
                a, b = flat(n[3]), flat(n[4])
                return [n[1], n[2], len(a) + 3] + a + b
            nodes = flat(emit(0))
            roots.append(len(tree)); tree += nodes
            formula = np.array([best[l] for l in t.apply(features(ze))])
            P = np.stack([total(copies(ze, l), sums(ze, f)) for l, f in chosen], 1)
            held[ie] = P[np.arange(len(ie)), formula]
            results.append(report(held[ie], ze, f'{["forward", "data", "weight"][op]} {"nhwc" if last else "nchw"}'))
    test = ~train
    results.append(report(held[test], pick(q, test), 'all'))
    for tag, m in (('groups 1, aligned', (q.groups == 1) & (q.c % 8 == 0) & (q.k % 8 == 0)), ('groups 1, c or k 3 or 4', (q.groups == 1) & ((q.c % 8 > 0) | (q.k % 8 > 0))), ('grouped', q.groups > 1)):
        results.append(report(held[test & m], pick(q, test & m), tag))
    print(pd.DataFrame(results).round(4).to_string())
    out = d[test].assign(predicted=held[test])
    def bits(l):  # x 1, y 2, w 4; 8: padded; 16: what is needed
        if l in ('none', 'needed'): return 16 * (l == 'needed')
        return sum(1 << 'xyw'.index(letter) for letter in l.lower()) + 8 * l.isupper()
    numbers = [v for l, f in table for v in (bits(l),) + f]
    def const(name, values, kind): return f'const {name}: [{kind}; {len(values)}] = [' + ', '.join(map(str, values)) + '];\n'
    text = open(template).read()
    a, b = text.index('// BEGIN'), text.index('// END')
    body = ('// BEGIN tables written by fit.py\n/// Start of each tree in TREE: two (channels first, channels last) per operation.\n' + const('ROOTS', roots, 'usize') +
            '/// Seven numbers per formula: copies, kind of partial sums, a, b, flat, unit, limit.\n' + const('FORMULAS', numbers, 'u32') +
            '/// Preorder: feature, threshold, offset of the right subtree; or 100 + formula for a leaf.\n' + const('TREE', tree, 'u32'))
    open(output, 'w').write(text[:a] + body + text[b:])
    print('formulas', len(table), 'tree numbers', len(tree))

main()
