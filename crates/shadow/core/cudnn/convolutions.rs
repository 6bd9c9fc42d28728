//! Workspace bytes that cuDNN asks for per convolution.
//!
//! Measured on an H200 (driver 580.159.04, cuDNN 9.19, PyTorch 2.11, benchmark mode off, TF32 on): 163,158 random
//! convolutions with square inputs. `tools/shadow/fit_convolutions.py` writes the tables from two thirds of them.
//! The other third (55,020 rows) is the hold-out set. There, by operation (channels first / channels last):
//!
//! | | exact to 512 bytes | error below 5 % of x + y + w | mean signed error / (x + y + w) | sum of errors / sum |
//! |---|---|---|---|---|
//! | forward | 73.2 / 69.8 % | 82.1 / 84.3 % | -2.2 / -7.8 % | +2.3 / -3.6 % |
//! | data | 77.7 / 69.9 % | 85.4 / 86.6 % | +1.1 / -3.8 % | -1.4 / -2.4 % |
//! | filter | 37.6 / 32.8 % | 69.6 / 66.9 % | -15.4 / -12.9 % | -4.2 / -4.6 % |
//!
//! Not measured: sides that differ, fewer than 3 channels, and unaligned channel counts other than 3 and 4.
//! float16 and bfloat16 differ in some rows (mostly 3 input channels), which `half` cannot tell apart.

/// Which of the three cuDNN operations runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvolutionOperation {
    Forward,
    /// Gradient of the input.
    Data,
    /// Gradient of the weight.
    Filter,
}

/// One convolution. Axes that do not exist have input 1, kernel 1, stride 1, padding 0 and dilation 1.
#[derive(Clone, Copy, Debug)]
pub struct Convolution {
    pub operation: ConvolutionOperation,
    /// float16 or bfloat16; otherwise float32.
    pub half: bool,
    pub channels_last: bool,
    pub batch: u64,
    /// Input channels.
    pub channels: u64,
    /// Output channels.
    pub filters: u64,
    pub input: [u64; 3],
    pub kernel: [u64; 3],
    pub stride: [u64; 3],
    pub padding: [u64; 3],
    pub dilation: [u64; 3],
    pub groups: u64,
}

/// Quantities that the trees test and the formulas use; x, y and w are bytes of input, output and weight.
pub struct Sizes {
    pub group_channels: u64,
    pub group_filters: u64,
    pub input: u64,
    pub output: u64,
    output_edge: u64,
    pub taps: u64,
    pub x: u64,
    pub y: u64,
    pub w: u64,
}

pub fn sizes(c: &Convolution) -> Sizes {
    let edge = |i: usize| {
        let reach = c.dilation[i] * c.kernel[i].saturating_sub(1) + 1;
        (c.input[i] + 2 * c.padding[i]).saturating_sub(reach) / c.stride[i].max(1) + 1
    };
    let element = if c.half { 2 } else { 4 };
    let groups = c.groups.max(1);
    let (group_channels, group_filters) = (c.channels / groups, c.filters / groups);
    let (input, taps) = (c.input.iter().product::<u64>(), c.kernel.iter().product::<u64>());
    let output = edge(0) * edge(1) * edge(2);
    Sizes {
        group_channels,
        group_filters,
        input,
        output,
        output_edge: edge(0).max(edge(1)).max(edge(2)),
        taps,
        x: c.batch * c.channels * input * element,
        y: c.batch * c.filters * output * element,
        w: c.filters * group_channels * taps * element,
    }
}

/// Feature number `index` of the trees, in the order of `features` in `fit_convolutions.py`.
fn feature(c: &Convolution, s: &Sizes, index: u32) -> u64 {
    let largest = |a: &[u64; 3]| a[0].max(a[1]).max(a[2]);
    let alignment = |v: u64| {
        if v.is_multiple_of(8) {
            0
        } else if v.is_multiple_of(4) {
            1
        } else {
            2
        }
    };
    let tiles = |m: u64, n: u64| m.div_ceil(128) * n.div_ceil(128);
    match index {
        0 => u64::from(c.half),
        1 => alignment(s.group_channels),
        2 => alignment(s.group_filters),
        3 => c.channels,
        4 => c.filters,
        5 => s.group_channels,
        6 => s.group_filters,
        7 => c.batch,
        8 => c.groups,
        9 => c.input.iter().filter(|&&side| side > 1).count() as u64,
        10 => largest(&c.kernel),
        11 => largest(&c.stride),
        12 => largest(&c.padding),
        13 => largest(&c.dilation),
        14 => largest(&c.input),
        15 => s.output_edge,
        16 => s.input,
        17 => s.output,
        18 => s.taps,
        19 => c.batch * s.output,
        20 => c.batch * s.input,
        21 => s.group_channels * s.taps,
        22 => s.group_filters * s.taps,
        23 => s.x >> 10,
        24 => s.y >> 10,
        25 => s.w >> 10,
        26 => (c.channels * c.filters) >> 4,
        27 => (c.batch * s.output * c.filters * s.group_channels * s.taps) >> 20,
        28 => tiles(c.batch * s.output, c.filters),
        29 => tiles(c.batch * s.input, c.channels),
        30 => tiles(c.filters, c.channels * s.taps),
        31 => (s.y * 16 / s.x.max(1)).min(100_000),
        32 => (s.w * 16 / (s.x + s.y).max(1)).min(100_000),
        _ => u64::from(largest(&c.stride) >= largest(&c.kernel)),
    }
}

/// Bytes of the copies in another layout or with padded channels: bit 1 x, 2 y, 4 w, 8 padded; 16 what is needed.
fn copies(c: &Convolution, s: &Sizes, which: u32) -> u64 {
    let (unit, element) = if c.half { (8, 2) } else { (4, 4) };
    // A grouped convolution runs on square blocks of a power of two.
    let block = s.group_channels.max(s.group_filters).next_power_of_two().max(4);
    let pad = |size: u64| {
        if c.groups > 1 { block } else { size.next_multiple_of(unit) }
    };
    let (channels, filters) = (pad(s.group_channels) * c.groups, pad(s.group_filters));
    let padded_x = c.batch * channels * s.input * element;
    let padded_y = c.batch * filters * c.groups * s.output * element;
    let padded_w = filters * channels * s.taps * element;
    let tensors = if which < 8 { [s.x, s.y, s.w] } else { [padded_x, padded_y, padded_w] };
    let mut copied = [which & 1 != 0, which & 2 != 0, which & 4 != 0];
    if which == 16 {
        // What a channels-last kernel with aligned channels needs: a tensor that differs is copied.
        let (pad_x, pad_y, first) = (channels != c.channels, filters != s.group_filters, !c.channels_last);
        copied = [first || pad_x, first && s.output > 1 || pad_y, first && s.taps > 1 || pad_x || pad_y];
    }
    tensors.iter().zip(copied).map(|(bytes, copied)| if copied { *bytes } else { 0 }).sum()
}

/// Bytes of the fp32 partial sums when the reduction is split over the 132 multiprocessors.
fn partial_sums(c: &Convolution, s: &Sizes, formula: &[u32]) -> u64 {
    let [kind, a, b, flat, unit, limit] = std::array::from_fn(|i| u64::from(formula[i]));
    let filter = if c.half { 2 * s.w } else { s.w };
    match kind {
        0 => return a,
        1 => return a * filter,
        _ => {}
    }
    // The matrix product has rows times columns per tap; a tile is a times b elements.
    let (rows, columns, taps) = match c.operation {
        ConvolutionOperation::Forward => (c.batch * s.output, s.group_filters, 1),
        ConvolutionOperation::Data => (c.batch * s.input, s.group_channels, 1),
        ConvolutionOperation::Filter => (s.group_filters, s.group_channels, s.taps),
    };
    let across = if flat == 1 { (columns * taps).div_ceil(b) } else { taps * columns.div_ceil(b) };
    let tiles = ((rows.div_ceil(a) * across).next_multiple_of(unit) * c.groups).max(1);
    match kind {
        2 => tiles * limit * a * b * 4,
        3 => (limit / tiles).max(1) * tiles * a * b * 4,
        _ => (limit / tiles).max(1) * filter,
    }
}

/// Bytes of workspace that PyTorch requests for the convolution; 0 when it requests none.
pub fn workspace_bytes(convolution: &Convolution) -> u64 {
    let s = sizes(convolution);
    let mut at = ROOTS[2 * convolution.operation as usize + usize::from(convolution.channels_last)];
    while TREE[at] < 100 {
        let left = feature(convolution, &s, TREE[at]) <= u64::from(TREE[at + 1]);
        at += if left { 3 } else { TREE[at + 2] as usize };
    }
    let formula = &FORMULAS[7 * (TREE[at] as usize - 100)..][..7];
    match copies(convolution, &s, formula[0]) + partial_sums(convolution, &s, &formula[1..]) {
        0 => 0,
        bytes => bytes + 16,
    }
}

// BEGIN tables written by fit.py
/// Start of each tree in TREE: two (channels first, channels last) per operation.
const ROOTS: [usize; 6] = [0, 301, 570, 839, 1104, 1581];
/// Seven numbers per formula: copies, kind of partial sums, a, b, flat, unit, limit.
const FORMULAS: [u32; 476] = [
    0, 0, 0, 0, 0, 0, 0, 15, 0, 0, 0, 0, 0, 0, 6, 1, 1, 0, 0, 0, 0, 13, 0, 0, 0, 0, 0, 0, 16, 0, 256, 0, 0, 0, 0, 0, 0,
    256, 0, 0, 0, 0, 4, 2, 128, 32, 0, 1, 1, 5, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 5, 0, 16777216, 0, 0, 0, 0, 6,
    0, 1048576, 0, 0, 0, 0, 5, 2, 64, 32, 0, 1, 1, 1, 0, 256, 0, 0, 0, 0, 4, 0, 256, 0, 0, 0, 0, 16, 3, 128, 32, 0, 1,
    120, 16, 0, 6291456, 0, 0, 0, 0, 6, 0, 131072, 0, 0, 0, 0, 4, 0, 4194304, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 5, 1, 1,
    0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 13, 0, 16384, 0, 0, 0, 0, 16, 2, 256, 64, 0, 8, 3, 0, 3, 128, 32, 0, 1, 132, 5,
    0, 1572864, 0, 0, 0, 0, 16, 2, 128, 128, 0, 8, 2, 3, 0, 1572864, 0, 0, 0, 0, 14, 0, 256, 0, 0, 0, 0, 2, 1, 1, 0, 0,
    0, 0, 6, 0, 16777216, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 7, 1, 2, 0, 0, 0, 0, 0, 2, 64, 32, 1, 1, 1, 0, 1, 2, 0, 0,
    0, 0, 0, 1, 4, 0, 0, 0, 0, 0, 1, 8, 0, 0, 0, 0, 0, 4, 128, 128, 1, 8, 132, 0, 1, 32, 0, 0, 0, 0, 0, 1, 64, 0, 0, 0,
    0, 16, 2, 64, 64, 0, 1, 3, 16, 1, 24, 0, 0, 0, 0, 3, 0, 256, 0, 0, 0, 0, 16, 3, 64, 128, 1, 1, 132, 16, 0, 1572864,
    0, 0, 0, 0, 16, 1, 8, 0, 0, 0, 0, 16, 1, 3, 0, 0, 0, 0, 11, 2, 64, 32, 0, 1, 3, 11, 1, 32, 0, 0, 0, 0, 16, 1, 14,
    0, 0, 0, 0, 15, 2, 64, 128, 0, 8, 2, 16, 3, 64, 64, 0, 1, 120, 16, 2, 128, 128, 0, 1, 2, 16, 0, 3145728, 0, 0, 0,
    0, 15, 2, 64, 32, 0, 1, 1, 16, 3, 128, 128, 1, 1, 132, 16, 2, 192, 256, 1, 1, 4, 16, 3, 64, 128, 0, 1, 120, 16, 4,
    128, 64, 0, 1, 120, 16, 0, 7864320, 0, 0, 0, 0, 16, 0, 7077888, 0, 0, 0, 0, 16, 1, 5, 0, 0, 0, 0, 11, 4, 64, 256,
    1, 8, 132, 16, 3, 256, 128, 1, 1, 132, 11, 0, 2621440, 0, 0, 0, 0, 0, 2, 64, 64, 0, 1, 2, 16, 3, 192, 128, 0, 1,
    132, 16, 0, 3932160, 0, 0, 0, 0, 7, 1, 9, 0, 0, 0, 0,
];
/// Preorder: feature, threshold, offset of the right subtree; or 100 + formula for a leaf.
const TREE: [u32; 2042] = [
    21, 776, 132, 5, 3, 36, 6, 448, 20, 5, 1, 4, 100, 0, 0, 8, 26, 288, 4, 100, 101, 12, 1, 4, 100, 102, 31, 191, 12,
    0, 0, 8, 32, 0, 4, 103, 100, 101, 100, 10, 2, 36, 11, 1, 4, 100, 0, 0, 8, 25, 220, 4, 100, 104, 25, 9, 12, 2, 0, 8,
    5, 7, 4, 100, 105, 106, 20, 49088, 8, 5, 52, 4, 102, 104, 104, 27, 1080, 28, 8, 16, 24, 0, 0, 12, 21, 42, 4, 100,
    2, 1, 4, 107, 101, 5, 10, 4, 100, 2, 0, 4, 108, 101, 101, 0, 0, 12, 30, 219, 8, 3, 10, 4, 107, 101, 109, 5, 14, 4,
    101, 24, 12592, 8, 3, 1664, 4, 101, 110, 8, 16, 4, 108, 101, 24, 6764, 108, 26, 392, 36, 0, 0, 16, 33, 0, 12, 4, 3,
    4, 101, 20, 5184, 4, 111, 108, 100, 2, 0, 8, 1, 0, 4, 104, 101, 21, 7040, 8, 18, 2, 4, 105, 101, 101, 10, 2, 8, 11,
    1, 4, 100, 104, 0, 0, 24, 24, 450, 12, 21, 1960, 4, 107, 18, 26, 4, 111, 104, 28, 56, 8, 29, 97, 4, 104, 108, 108,
    18, 38, 28, 28, 111, 20, 2, 0, 16, 20, 1800, 8, 21, 5568, 4, 108, 104, 19, 2128, 4, 104, 108, 101, 6, 48, 4, 101,
    108, 24, 556, 8, 17, 2, 4, 107, 108, 112, 18, 38, 48, 10, 2, 8, 11, 1, 4, 100, 104, 28, 529, 20, 0, 0, 12, 21, 880,
    4, 107, 19, 13312, 4, 108, 104, 25, 7840, 4, 101, 108, 0, 0, 12, 4, 72, 4, 108, 21, 1248, 4, 108, 104, 6, 24, 4,
    101, 104, 0, 0, 4, 108, 22, 14112, 4, 101, 18, 87, 4, 108, 100, 1, 0, 204, 28, 229, 116, 6, 14, 28, 25, 49, 12, 10,
    2, 8, 11, 1, 4, 100, 105, 104, 0, 0, 12, 18, 26, 8, 6, 3, 4, 101, 104, 107, 104, 18, 38, 72, 28, 55, 48, 21, 2352,
    20, 0, 0, 12, 3, 224, 4, 100, 11, 1, 4, 104, 100, 8, 16, 4, 100, 104, 0, 0, 24, 20, 2592, 12, 24, 544, 8, 4, 112,
    4, 113, 114, 100, 4, 72, 4, 100, 22, 1440, 4, 115, 100, 100, 28, 111, 8, 8, 16, 4, 100, 116, 27, 2545, 12, 0, 0, 4,
    105, 8, 16, 4, 100, 104, 100, 0, 0, 4, 107, 24, 1002, 8, 22, 1980, 4, 105, 100, 100, 18, 38, 68, 22, 680, 20, 30,
    12, 16, 11, 1, 12, 0, 0, 8, 18, 5, 4, 105, 104, 100, 104, 104, 0, 0, 24, 21, 1116, 12, 21, 392, 4, 104, 28, 1528,
    4, 104, 105, 28, 527, 8, 19, 25026, 4, 104, 115, 104, 20, 34816, 12, 21, 2736, 8, 21, 680, 4, 100, 104, 104, 22,
    2736, 8, 14, 44, 4, 100, 104, 104, 0, 0, 8, 8, 16, 4, 107, 117, 2, 0, 8, 15, 21, 4, 113, 100, 104, 22, 1534, 24,
    21, 26, 4, 100, 5, 5, 16, 2, 0, 8, 0, 0, 4, 107, 100, 9, 2, 4, 100, 105, 104, 0, 0, 20, 23, 17600, 16, 21, 1200,
    12, 19, 272, 4, 107, 8, 2, 4, 107, 100, 100, 103, 8, 2, 20, 18, 94, 8, 9, 2, 4, 100, 103, 7, 6, 4, 100, 6, 10, 4,
    101, 103, 116, 18, 2, 60, 11, 1, 28, 8, 24, 12, 23, 6950, 4, 100, 7, 3, 4, 100, 105, 21, 7, 4, 100, 31, 17, 8, 28,
    253, 4, 105, 118, 119, 0, 0, 12, 5, 160, 4, 100, 11, 3, 4, 104, 101, 8, 2, 12, 11, 3, 4, 104, 26, 576, 4, 104, 120,
    25, 5, 4, 100, 101, 27, 3298, 144, 6, 14, 36, 0, 0, 16, 5, 52, 8, 10, 11, 4, 100, 110, 2, 1, 4, 108, 101, 5, 3, 12,
    10, 15, 8, 5, 1, 4, 100, 101, 119, 19, 3906, 4, 104, 101, 5, 14, 36, 11, 6, 28, 0, 0, 8, 3, 80, 4, 100, 101, 5, 1,
    4, 100, 23, 347, 8, 11, 1, 4, 101, 104, 11, 3, 4, 101, 121, 19, 1808, 4, 108, 100, 0, 0, 36, 20, 1800, 16, 24, 503,
    4, 100, 11, 1, 8, 23, 776, 4, 122, 101, 100, 11, 1, 12, 24, 1584, 4, 108, 23, 2750, 4, 108, 101, 11, 3, 4, 104,
    101, 11, 1, 16, 23, 3168, 12, 8, 16, 8, 22, 1440, 4, 108, 104, 123, 104, 27, 314, 4, 108, 11, 3, 8, 19, 1957, 4,
    104, 101, 5, 72, 4, 124, 104, 5, 11, 12, 33, 0, 8, 0, 0, 4, 100, 101, 100, 23, 7206, 12, 11, 1, 8, 18, 38, 4, 108,
    101, 108, 11, 3, 40, 11, 1, 28, 6, 52, 4, 101, 29, 538, 8, 0, 0, 4, 108, 104, 5, 72, 4, 101, 6, 112, 4, 104, 18,
    38, 4, 104, 108, 8, 16, 8, 18, 38, 4, 104, 101, 118, 108, 11, 6, 264, 8, 3, 192, 23, 7376, 104, 3, 10, 28, 18, 5,
    12, 11, 1, 8, 14, 44, 4, 105, 104, 104, 0, 0, 8, 31, 544, 4, 108, 104, 6, 10, 4, 101, 104, 0, 0, 36, 11, 1, 24, 18,
    38, 20, 22, 944, 4, 100, 29, 29, 8, 30, 85, 4, 125, 126, 29, 51, 4, 104, 100, 104, 11, 3, 8, 21, 24, 4, 120, 104,
    127, 11, 1, 32, 29, 76, 16, 2, 0, 12, 25, 7128, 4, 100, 23, 1552, 4, 100, 104, 104, 22, 3328, 8, 22, 118, 4, 104,
    100, 21, 2736, 4, 100, 104, 11, 3, 4, 104, 100, 11, 3, 56, 11, 1, 44, 10, 2, 8, 24, 87040, 4, 100, 104, 27, 22798,
    32, 0, 0, 16, 29, 544, 8, 31, 6, 4, 104, 100, 1, 0, 4, 104, 101, 2, 0, 12, 6, 48, 8, 28, 504, 4, 100, 104, 104,
    104, 104, 0, 0, 8, 30, 1, 4, 120, 104, 104, 0, 0, 12, 6, 3, 4, 104, 5, 24, 4, 108, 128, 2, 0, 16, 3, 72, 4, 104, 9,
    2, 8, 13, 1, 4, 100, 104, 104, 104, 6, 1, 4, 100, 6, 36, 48, 18, 5, 20, 31, 5, 8, 24, 17216, 4, 127, 129, 24,
    12416, 4, 118, 22, 11, 4, 105, 118, 0, 0, 16, 25, 52, 8, 31, 37, 4, 100, 101, 10, 4, 4, 104, 130, 2, 0, 4, 104, 5,
    52, 4, 104, 129, 26, 576, 8, 23, 396, 4, 131, 126, 31, 82, 8, 31, 13, 4, 118, 104, 118, 108, 10, 2, 112, 11, 1, 68,
    7, 24, 52, 7, 6, 28, 7, 3, 20, 7, 1, 8, 25, 76, 4, 105, 132, 25, 88, 8, 8, 2, 4, 133, 105, 133, 8, 2, 4, 134, 100,
    8, 2, 20, 7, 12, 12, 30, 8, 4, 135, 30, 17, 4, 136, 135, 30, 17, 4, 136, 135, 100, 7, 48, 8, 8, 8, 4, 137, 105, 8,
    2, 4, 138, 100, 25, 62, 16, 8, 2, 12, 19, 8096, 4, 104, 26, 288, 4, 139, 140, 100, 0, 0, 16, 19, 767, 4, 141, 22,
    224, 4, 100, 25, 1408, 4, 142, 104, 19, 12672, 4, 141, 22, 288, 4, 143, 104, 25, 3864, 292, 19, 6192, 72, 0, 0, 36,
    27, 32, 12, 5, 9, 4, 100, 19, 792, 4, 105, 144, 27, 440, 12, 19, 1088, 4, 101, 26, 392, 4, 144, 145, 5, 14, 4, 104,
    26, 5632, 4, 142, 104, 25, 43, 16, 19, 2724, 4, 100, 5, 2, 4, 100, 3, 48, 4, 146, 101, 20, 602112, 12, 19, 792, 4,
    104, 30, 31, 4, 101, 104, 15, 10, 4, 101, 144, 5, 2, 8, 5, 1, 4, 100, 109, 30, 20, 128, 6, 72, 40, 0, 0, 12, 25,
    19, 4, 147, 22, 242, 4, 142, 148, 3, 72, 16, 3, 10, 4, 149, 3, 48, 8, 28, 570, 4, 140, 150, 150, 21, 696, 4, 101,
    21, 1960, 4, 151, 152, 0, 0, 28, 3, 24, 16, 6, 352, 8, 21, 169, 4, 144, 104, 21, 126, 4, 153, 144, 19, 13600, 4,
    144, 26, 544, 4, 142, 154, 21, 379, 32, 30, 3, 12, 16, 3616, 4, 155, 22, 3328, 4, 156, 151, 18, 38, 16, 6, 576, 8,
    16, 5248, 4, 144, 148, 31, 2047, 4, 145, 153, 139, 19, 22640, 8, 18, 38, 4, 104, 144, 30, 9, 12, 5, 72, 4, 157, 19,
    68868, 4, 156, 158, 5, 72, 4, 156, 159, 6, 72, 40, 0, 0, 12, 5, 52, 8, 7, 12, 4, 104, 153, 156, 18, 38, 20, 30, 65,
    12, 3, 352, 8, 21, 3040, 4, 143, 159, 101, 21, 324, 4, 101, 104, 5, 88, 4, 158, 149, 18, 38, 36, 0, 0, 8, 6, 112,
    4, 104, 154, 30, 49, 16, 21, 880, 8, 3, 72, 4, 157, 151, 30, 34, 4, 149, 101, 30, 110, 8, 21, 1216, 4, 104, 101,
    104, 18, 160, 4, 139, 144, 18, 38, 40, 0, 0, 28, 30, 251, 20, 19, 1510, 8, 19, 208, 4, 105, 104, 30, 125, 4, 101,
    30, 163, 4, 158, 104, 27, 765, 4, 105, 104, 30, 251, 8, 24, 2203, 4, 104, 101, 104, 0, 0, 16, 19, 396, 4, 105, 9,
    2, 8, 22, 17248, 4, 160, 104, 161, 19, 11772, 12, 6, 112, 4, 156, 19, 1929, 4, 104, 132, 12, 2, 4, 109, 162, 32, 0,
    384, 0, 0, 160, 10, 2, 48, 27, 691, 32, 28, 352, 20, 27, 15, 8, 9, 2, 4, 105, 104, 11, 1, 4, 137, 28, 75, 4, 104,
    143, 8, 2, 8, 28, 704, 4, 152, 142, 109, 11, 1, 8, 25, 176, 4, 105, 162, 30, 13, 4, 142, 105, 5, 22, 48, 6, 288,
    40, 3, 160, 28, 15, 26, 12, 29, 3616, 4, 105, 6, 72, 4, 147, 101, 21, 104, 8, 29, 912, 4, 101, 100, 27, 319, 4,
    146, 163, 8, 112, 8, 26, 7936, 4, 153, 104, 100, 22, 59008, 4, 141, 101, 6, 72, 24, 30, 26, 8, 4, 24, 4, 142, 150,
    26, 1408, 8, 2, 1, 4, 153, 101, 6, 52, 4, 101, 105, 30, 26, 16, 26, 392, 4, 137, 22, 2496, 8, 19, 13600, 4, 156,
    154, 158, 30, 226, 20, 6, 112, 4, 141, 25, 3492, 8, 22, 7456, 4, 154, 104, 18, 38, 4, 100, 141, 104, 8, 2, 200, 30,
    35, 160, 19, 12401, 40, 22, 9408, 32, 26, 152, 12, 29, 2592, 8, 19, 3920, 4, 105, 104, 164, 19, 3722, 4, 100, 20,
    10368, 8, 19, 6178, 4, 145, 134, 18, 5, 4, 100, 104, 23, 3528, 4, 104, 144, 25, 27, 36, 27, 260, 20, 26, 7, 4, 139,
    10, 2, 12, 24, 684, 4, 139, 23, 1552, 4, 139, 140, 139, 26, 108, 12, 5, 72, 8, 22, 648, 4, 150, 156, 156, 150, 22,
    2736, 56, 25, 367, 44, 21, 680, 20, 22, 816, 16, 11, 1, 8, 27, 1940, 4, 150, 154, 10, 2, 4, 150, 143, 156, 3, 288,
    20, 22, 648, 8, 30, 13, 4, 156, 151, 19, 36482, 4, 139, 30, 10, 4, 158, 159, 143, 27, 9765, 4, 104, 22, 1440, 4,
    152, 159, 18, 17, 12, 3, 48, 8, 6, 576, 4, 148, 145, 164, 10, 7, 8, 22, 11184, 4, 155, 104, 10, 11, 4, 165, 144,
    18, 38, 32, 4, 10, 4, 104, 30, 131, 24, 25, 1470, 12, 25, 882, 8, 21, 7456, 4, 100, 104, 100, 21, 2104, 4, 104, 30,
    78, 4, 166, 100, 104, 15, 34, 4, 144, 134, 21, 26, 20, 19, 11492, 8, 24, 7920, 4, 100, 138, 8, 72, 8, 26, 352, 4,
    167, 109, 138, 104, 18, 38, 32, 30, 263, 28, 19, 792, 4, 100, 0, 0, 12, 30, 113, 8, 22, 1664, 4, 164, 100, 115, 30,
    61, 4, 100, 18, 17, 4, 100, 104, 104, 0, 0, 20, 5, 3, 8, 27, 319, 4, 104, 101, 27, 1277, 4, 104, 6, 352, 4, 101,
    141, 19, 1864, 12, 9, 2, 8, 22, 7232, 4, 105, 104, 104, 18, 87, 8, 26, 4864, 4, 157, 136, 20, 331776, 4, 142, 144,
];
// END

#[cfg(test)]
mod tests {
    use super::*;

    /// Operation, half, channels last, then the columns of conv*.csv from dims to groups.
    fn bytes(operation: ConvolutionOperation, half: bool, channels_last: bool, row: [u64; 10]) -> u64 {
        let [dims, batch, channels, filters, size, kernel, stride, padding, dilation, groups] = row;
        let axes = |value, absent| std::array::from_fn(|axis| if (axis as u64) < dims { value } else { absent });
        workspace_bytes(&Convolution {
            operation,
            half,
            channels_last,
            batch,
            channels,
            filters,
            input: axes(size, 1),
            kernel: axes(kernel, 1),
            stride: axes(stride, 1),
            padding: axes(padding, 0),
            dilation: axes(dilation, 1),
            groups,
        })
    }

    #[test]
    fn measured_rows() {
        use ConvolutionOperation::{Data, Filter, Forward};
        for (operation, half, last, row, measured) in [
            (Forward, true, false, [2, 32, 256, 1024, 32, 3, 1, 1, 1, 1], 88604819),
            (Forward, false, true, [2, 1, 640, 80, 192, 3, 1, 1, 1, 1], 6291811),
            (Forward, false, true, [2, 4, 512, 128, 16, 3, 1, 0, 1, 1], 1835391),
            (Data, true, false, [2, 32, 256, 1024, 32, 3, 1, 1, 1, 1], 88604819),
            (Data, false, false, [2, 4, 768, 64, 32, 3, 1, 0, 2, 1], 15155347),
            (Data, false, true, [2, 1, 768, 192, 64, 3, 4, 1, 1, 1], 5505040),
            (Filter, false, false, [2, 4, 768, 64, 32, 3, 1, 0, 2, 1], 18694535),
            (Filter, true, true, [2, 4, 320, 80, 112, 3, 1, 1, 1, 1], 3146079),
            (Filter, false, true, [2, 8, 384, 128, 128, 3, 2, 0, 2, 1], 7078371),
            (Forward, true, false, [3, 2, 256, 256, 16, 3, 1, 0, 1, 1], 10543120),
            (Forward, true, true, [2, 32, 96, 512, 112, 1, 1, 0, 1, 1], 0),
            (Data, false, true, [3, 2, 1280, 96, 32, 3, 1, 0, 1, 32], 993394835),
        ] {
            assert!(bytes(operation, half, last, row).abs_diff(measured) <= 512, "{operation:?} {row:?}");
        }
    }
}
