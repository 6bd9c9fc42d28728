//! Workspace of Hopper's convolution kernels that may divide the last tiles among the multiprocessors (stream-K).
//!
//! cuDNN without a GPU answers as for 18 multiprocessors, whatever properties it is given. Its answer is the copies of
//! tensors plus what these kernels add, and the second part is computed here for both numbers of multiprocessors.
//!
//! Measured on an H200 (132 multiprocessors, driver 580.159.04, cuDNN 9.19): 8,647 plans of 3,399 random convolutions,
//! with a handle and without a GPU. The costs of [`costs`] and [`levels`] are fitted to all of them. Fitted to half of them,
//! they are exact to the byte in the other half for:
//!
//! | plans | here | cuDNN without a GPU |
//! |---|---|---|
//! | that may divide tiles | 98 % | 28 % |
//! | that may divide tiles, with groups | 72 % | 28 % |
//! | that may not | 98 % | 65 % |
//! | that may not, with groups | 95 % | 84 % |
//!
//! Shapes of tiles, counters and the number of tiles agree with every plan without groups that may divide tiles. Into
//! how many parts a tile is divided is fitted. Only 132 multiprocessors were measured; other numbers are scaled.

use super::convolutions::{Convolution, ConvolutionOperation, Sizes, sizes};

/// Multiprocessors that cuDNN assumes without a GPU: every one of the measured plans agrees with it.
const ASSUMED_MULTIPROCESSORS: u64 = 18;

/// Multiprocessors of the measured card.
const MEASURED_MULTIPROCESSORS: u64 = 132;

/// How kernels of a plan cover the output.
#[derive(Clone, Copy, Debug)]
pub struct Knobs {
    tile: u32,
    reduction_tile: u32,
    cluster: (u64, u64),
    divides: bool,
}

impl Knobs {
    /// The knobs in the JSON of a plan; `None` for plans of other kernels.
    pub fn of_json(json: &str) -> Option<Knobs> {
        let value = |name: &str| {
            let (_, rest) = json.split_once(&format!("\"CUDNN_KNOB_TYPE_{name}\":"))?;
            let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            rest[..end].parse::<u32>().ok()
        };
        Some(Knobs {
            tile: value("TILE_SIZE")?,
            reduction_tile: value("TILEK")?,
            cluster: (value("TILE_CGA_M")?.into(), value("TILE_CGA_N")?.into()),
            divides: value("WORKSPACE")? == 0,
        })
    }

    /// Rows and columns of a tile, by the value of `TILE_SIZE`: the one shape that agrees with all plans of that value.
    fn shape(self) -> Option<(u64, u64)> {
        Some(match self.tile {
            0 => (128, 128),
            1 => (128, 64),
            3 => (256, 128),
            4 => (256, 64),
            5 => (64, 64),
            6 => (128, 256),
            7 => (64, 128),
            9 => (64, 256),
            16 => (256, 32),
            18 => (64, 192),
            20 => (256, 96),
            _ => return None,
        })
    }

    /// Tiles of a wave on a card, by the size of a cluster: the one number that agrees with all plans of that size. For
    /// 12 and 14 several numbers agree.
    fn wave(self, multiprocessors: u64) -> Option<u64> {
        let cluster = self.cluster.0 * self.cluster.1;
        let measured = match cluster {
            1 | 2 => 132,
            3 => 117,
            4 | 8 => 120,
            5 => 110,
            6 => 102,
            7 => 105,
            12 => 96,
            14 => 98,
            16 => 112,
            _ => return None,
        };
        Some((measured * multiprocessors / MEASURED_MULTIPROCESSORS / cluster).max(1) * cluster)
    }
}

/// The matrix product of a convolution, in tiles.
#[derive(Clone, Copy)]
struct Product {
    tiles: u64,
    tile_bytes: u64,
    /// Steps along the reduced dimension, of 32 elements of float32 or 64 of the 16-bit types.
    steps: u64,
    /// Pieces that a part is made of: steps, or half steps for 16-bit types where the reduction tile is the smallest.
    pieces: u64,
    /// How many times the plan needs what it adds for these tiles.
    launches: u64,
}

fn product(knobs: Knobs, c: &Convolution) -> Option<Product> {
    let s = sizes(c);
    let (rows, columns, taps, reduced, reduced_taps) = match c.operation {
        ConvolutionOperation::Forward => (c.batch * s.output, s.group_filters, 1, s.group_channels, s.taps),
        ConvolutionOperation::Data => (c.batch * s.input, s.group_channels, 1, s.group_filters, s.taps),
        ConvolutionOperation::Filter => (s.group_filters, s.group_channels, s.taps, c.batch * s.output, 1),
    };
    let (tile_rows, tile_columns) = knobs.shape()?;
    let across = rows.div_ceil(tile_rows).next_multiple_of(knobs.cluster.0.max(1));
    let along = (columns.div_ceil(tile_columns) * taps).next_multiple_of(knobs.cluster.1.max(1));
    let widest = s.group_channels.max(s.group_filters);
    // Up to four wide groups count one by one, others together. Plans with narrow groups agree with neither.
    let launches = if c.groups > 1 && c.groups <= 4 && widest > 128 { c.groups } else { 1 };
    if c.groups > 1 && widest < 32 {
        return None;
    }
    let steps = reduced.div_ceil(if c.half { 64 } else { 32 }) * reduced_taps;
    Some(Product {
        tiles: across * along * c.groups.max(1) / launches,
        tile_bytes: tile_rows * tile_columns * 4,
        steps,
        pieces: if c.half && knobs.reduction_tile == 0 { 2 * steps } else { steps },
        launches,
    })
}

/// What decides into how many parts a tile is divided, in steps. Each has a value for divided tiles after whole waves,
/// and one for plans without a whole wave. Fitted to the measured plans.
struct Costs {
    /// A level of the tree that adds up the parts.
    level: [f64; 2],
    /// The least work of a part where there are more than eight.
    least: [u64; 2],
}

fn costs(knobs: Knobs, half: bool, bfloat16: bool) -> Costs {
    let (level, least) = match (half, bfloat16) {
        (false, _) => match knobs.tile {
            0 => ([6.3, 14.6], [4, 33]),
            3 | 6 => ([5.6, 10.5], [4, 33]),
            4 | 9 => ([6.1, 11.7], [4, 33]),
            5 | 16 => ([11.7, 24.7], [4, 33]),
            _ => ([8.3, 16.6], [4, 33]),
        },
        // None of 37 plans with these tiles was divided.
        (true, _) if knobs.tile == 1 && knobs.reduction_tile == 0 => ([f64::MAX; 2], [u64::MAX; 2]),
        (true, false) => match knobs.tile {
            0 => ([3.2, 6.5], [2, 17]),
            3 | 6 | 20 => ([2.9, 10.0], [2, 17]),
            4 | 9 => ([3.5, 5.5], [2, 17]),
            5 | 16 => ([5.9, 12.85], [2, 17]),
            _ => ([3.7, 8.6], [2, 17]),
        },
        (true, true) => match knobs.tile {
            0 => ([25.3, 53.0], [8, 17]),
            3 | 6 | 20 => ([23.4, 42.6], [8, 17]),
            4 | 9 => ([26.0, 45.5], [8, 17]),
            5 | 16 => ([50.5, 98.7], [8, 17]),
            _ => ([29.9, 66.3], [8, 17]),
        },
    };
    Costs { level, least }
}

/// No tile of the measured plans was divided into more parts.
const MOST_PARTS: u64 = 128;

/// Up to this many parts, cuDNN takes a power of two or as many as the wave has room for.
const FEW_PARTS: u64 = 8;

/// Levels of the tree for this many parts. After whole waves, later levels cost less (fitted).
fn levels(parts: u64, after_waves: bool) -> f64 {
    const AFTER_WAVES: [f64; 9] = [0.0, 0.0, 1.0, 1.75, 2.0, 2.35, 2.525, 2.7, 2.8];
    let levels = (parts as f64).log2();
    match AFTER_WAVES.get(parts as usize) {
        _ if !after_waves => levels.ceil(),
        Some(&fitted) => fitted,
        None => AFTER_WAVES[8] + 0.6 * (levels - 3.0),
    }
}

/// Tiles beyond the whole waves are divided into this many parts each.
fn parts(product: Product, wave: u64, costs: &Costs) -> u64 {
    let most = wave.checked_div(product.tiles % wave).unwrap_or(1);
    let after_waves = product.tiles >= wave;
    let place = usize::from(!after_waves);
    let many = if most > FEW_PARTS { most.min(product.steps / costs.least[place]).min(MOST_PARTS) } else { most };
    let cost = |parts: u64| product.steps as f64 / parts as f64 + costs.level[place] * levels(parts, after_waves);
    let is_many = many > FEW_PARTS;
    let chosen = if is_many && !after_waves {
        many
    } else {
        let tried = [1, 2, 4, 8].into_iter().filter(|&parts| parts <= most);
        let tried = tried.chain((is_many || most <= FEW_PARTS).then_some(many));
        let tried = tried.filter(|&parts| parts <= product.steps.max(1));
        tried.min_by(|a, b| cost(*a).total_cmp(&cost(*b))).unwrap_or(1)
    };
    // No more parts than needed for that many pieces each.
    product.pieces.max(1).div_ceil(product.pieces.max(1).div_ceil(chosen))
}

/// Nodes of the binary tree that adds up parts of a tile.
fn nodes(mut parts: u64) -> u64 {
    let mut sum = 0;
    while parts > 1 {
        parts = parts.div_ceil(2);
        sum += parts;
    }
    sum
}

/// What kernels add to the copies of tensors: a tile of float32 for each part, counters of four bytes, and 127 bytes,
/// presumably to align.
fn added(product: Product, wave: u64, parts: u64) -> u64 {
    let last = product.tiles % wave;
    let mut counters = 0;
    let mut partial = 0;
    if parts > 1 {
        counters = 8 + last * nodes(parts);
        partial = last * parts * product.tile_bytes;
    }
    // One counter more where there are more than two waves.
    if product.tiles.div_ceil(wave) > 2 {
        counters += 1;
    }
    let bytes = if counters > 0 { 127 + 4 * counters + partial } else { 0 };
    if product.launches > 1 { product.launches * bytes.next_multiple_of(16) } else { bytes }
}

/// The workspace of a plan on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workspace {
    pub bytes: u64,
    /// The number of parts was chosen by the fitted costs.
    pub fitted: bool,
}

/// The workspace of a plan on a card, from that of the same plan without a GPU. `None` where the arithmetic is not
/// known.
pub fn workspace(
    without: u64,
    knobs: Knobs,
    c: &Convolution,
    bfloat16: bool,
    multiprocessors: u64,
) -> Option<Workspace> {
    let product = product(knobs, c)?;
    let costs = costs(knobs, c.half, bfloat16);
    let fitted_parts = |wave: u64| if knobs.divides { parts(product, wave, &costs) } else { 1 };
    let cluster = (knobs.cluster.0 * knobs.cluster.1).max(1);
    let (assumed, wave) = (ASSUMED_MULTIPROCESSORS / cluster * cluster, knobs.wave(multiprocessors)?);
    let copies_with = |parts: u64| without.checked_sub(added(product, assumed, parts));
    // The answer without a GPU shows its number of parts where the rest of it is copies of tensors.
    let most = if knobs.divides { assumed.checked_div(product.tiles % assumed).unwrap_or(1) } else { 1 };
    let tensors = sizes(c);
    let copies = std::iter::once(fitted_parts(assumed))
        .chain(1..=most)
        .find_map(|parts| copies_with(parts).filter(|&bytes| are_copies(bytes, &tensors)))
        .or_else(|| copies_with(fitted_parts(assumed)))?;
    let has_choice = knobs.divides && (1..=wave / 2).contains(&(product.tiles % wave));
    Some(Workspace { bytes: copies + added(product, wave, fitted_parts(wave)), fitted: has_choice })
}

/// Whether copies of some of the tensors in another layout take this many bytes.
fn are_copies(bytes: u64, s: &Sizes) -> bool {
    let copied =
        |set: u32| [s.x, s.y, s.w].iter().enumerate().map(|(i, size)| size * u64::from(set >> i & 1)).sum::<u64>();
    bytes == 0 || (1..8).any(|set| copied(set) + 16 == bytes)
}
