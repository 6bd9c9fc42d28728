//! The scratch memory of kernels during one call, by shape, on a Hopper GPU with PyTorch 2.11.
//!
//! These are the rules by which PyTorch and its libraries size their buffers, checked against recordings. Nothing here
//! allocates.

use crate::autograd::techniques::NumberFormat;
use oomph_base::round_up;

/// Multiprocessors of an H200, and how many threads one holds.
pub(crate) const MULTIPROCESSORS: u64 = 132;
const THREADS_PER_MULTIPROCESSOR: u64 = 2048;

/// Buffers of a reduction that is split over thread blocks: partial sums, and a counter for each column of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReductionScratch {
    pub(crate) partial_sums: u64,
    pub(crate) counters: u64,
}

/// Threads of a block that reduces, and how many numbers one thread adds at least and at most before more blocks help.
const THREADS: u64 = 512;
const FEWEST_PER_THREAD: u64 = 16;
const MOST_PER_THREAD: u64 = 256;

/// The buffers of a sum of all numbers, each sum of `bytes`, if it needs any (`setReduceConfig` in Reduce.cuh).
pub(crate) fn sum_of_all(numbers: u64, bytes: u64) -> Option<ReductionScratch> {
    let per_thread = numbers.div_ceil(THREADS);
    if per_thread < MOST_PER_THREAD {
        return None;
    }
    let wanted_blocks = MULTIPROCESSORS * (THREADS_PER_MULTIPROCESSOR / THREADS);
    let split = wanted_blocks.min(per_thread.div_ceil(FEWEST_PER_THREAD)).max(per_thread.div_ceil(MOST_PER_THREAD));
    Some(ReductionScratch { partial_sums: bytes * split, counters: 4 })
}

/// The buffers of a sum over the rows of a matrix, if it needs any (`setReduceConfig` in Reduce.cuh).
///
/// PyTorch gives a thread block 32 columns wide all rows, and splits the rows over blocks only where a thread would add
/// more than 256 numbers and the columns alone cannot fill the GPU.
pub(crate) fn sum_over_rows(rows: u64, columns: u64) -> Option<ReductionScratch> {
    let vector = [4, 2, 1].into_iter().find(|vector| columns.is_multiple_of(*vector)).unwrap_or(1);
    let threads = THREADS / vector;
    let power_below = |count: u64| if count < threads { 1 << count.max(1).ilog2() } else { threads };
    let columns_power = power_below(columns / vector);
    let height = power_below(rows).min(threads / columns_power.min(32));
    let width = columns_power.min(threads / height);

    if rows < (height * FEWEST_PER_THREAD).min(MOST_PER_THREAD) {
        return None;
    }
    let per_thread = rows.div_ceil(height);
    let blocks = (columns / vector).div_ceil(width);
    let wanted_blocks = MULTIPROCESSORS * (THREADS_PER_MULTIPROCESSOR / (width * height));
    if per_thread < MOST_PER_THREAD || blocks > wanted_blocks {
        return None;
    }
    let split = wanted_blocks.div_ceil(blocks).min(per_thread.div_ceil(FEWEST_PER_THREAD));
    let split = split.max(per_thread.div_ceil(MOST_PER_THREAD));
    (split > 1).then_some(ReductionScratch { partial_sums: 4 * columns * split * width * vector, counters: 4 * blocks })
}

/// The buffers of the place of the largest number of every row, if it needs any (`setReduceConfig` in Reduce.cuh).
///
/// All 512 threads of a block share a row. Rows are split over blocks where a thread would look at 256 numbers and more.
/// A partial result is a number of single precision and a place, in 16 bytes.
pub(crate) fn argmax_of_rows(rows: u64, columns: u64) -> Option<ReductionScratch> {
    const THREADS: u64 = 512;
    const FEWEST_PER_THREAD: u64 = 16;
    const MOST_PER_THREAD: u64 = 256;
    const PARTIAL: u64 = 16;

    let wanted_blocks = MULTIPROCESSORS * (THREADS_PER_MULTIPROCESSOR / THREADS);
    let per_thread = columns.div_ceil(THREADS);
    if per_thread < MOST_PER_THREAD || rows > wanted_blocks {
        return None;
    }
    let split = wanted_blocks.div_ceil(rows).min(per_thread.div_ceil(FEWEST_PER_THREAD));
    let split = split.max(per_thread.div_ceil(MOST_PER_THREAD));
    (split > 1).then_some(ReductionScratch { partial_sums: PARTIAL * rows * split, counters: 4 * rows })
}

/// The buffer of memory-efficient attention's backward for the gradient of the queries: a lock and a tile of sums for
/// each block of queries. The kernels for 16 bits have wider tiles, and add up the gradients of wide keys and values there,
/// too (`workspace_size` of the kernel).
pub(crate) fn memory_efficient_backward(
    sequences_by_heads: u64,
    length: u64,
    head_width: u64,
    number: NumberFormat,
) -> u64 {
    const LOCK: u64 = 16;
    let is_half = number == NumberFormat::Half;
    let rows = if head_width <= 64 { 64 } else { 128 };
    let columns = if is_half && (65..=128).contains(&head_width) { 128 } else { 64 };
    let of_queries = length.div_ceil(rows) * head_width.div_ceil(columns) * (LOCK + rows * columns * 4);
    let of_keys = if is_half && head_width > 128 { round_up(length, 64) * round_up(head_width, 128) * 4 } else { 0 };
    sequences_by_heads * (of_queries + 2 * of_keys)
}

/// The workspace of cuDNN's attention in forward.
pub(crate) const CUDNN_FORWARD: u64 = 256;

/// The workspace of cuDNN's attention in backward: single-precision sums of the gradient of the queries, and one number
/// per row.
pub(crate) fn cudnn_backward(sequences_by_heads: u64, length: u64, head_width: u64) -> u64 {
    sequences_by_heads * length * (head_width + 1) * 4 + CUDNN_FORWARD
}

/// Numbers of a head that flash attention computes with (`head_size_rounded`).
pub(crate) fn flash_head_width(head_width: u64) -> u64 {
    round_up(head_width, if head_width <= 128 { 32 } else { 64 })
}

/// Rows that flash attention's backward has buffers for (`seqlen_q_rounded`).
pub(crate) fn flash_backward_rows(length: u64) -> u64 {
    round_up(length, 128)
}

/// How many parts of the keys flash attention's forward works on at the same time, because the queries alone do not fill
/// the GPU (`num_splits_heuristic`): the fewest parts that keep it nearly as busy as any number of them.
pub(crate) fn flash_splits(sequences_by_heads: u64, length: u64, head_width: u64) -> u64 {
    const ROWS_PER_BLOCK: u64 = 64;
    const MOST_SPLITS: u64 = 128;
    // Thread blocks are small enough for two on a multiprocessor.
    const PLACES: u64 = 2 * MULTIPROCESSORS;
    let keys_per_block = match head_width {
        ..=64 => 256,
        65..=128 => 128,
        _ => 64,
    };
    let (blocks, key_blocks) = (sequences_by_heads * length.div_ceil(ROWS_PER_BLOCK), length.div_ceil(keys_per_block));
    if blocks as f32 >= 0.8 * PLACES as f32 {
        return 1;
    }
    // A split into more parts is skipped if its largest part has as many blocks as that of the split before it.
    let is_eligible = |splits: &u64| *splits == 1 || key_blocks.div_ceil(*splits) != key_blocks.div_ceil(*splits - 1);
    let efficiency = |splits: u64| {
        let waves = (blocks * splits) as f32 / PLACES as f32;
        waves / waves.ceil()
    };
    let eligible = || (1..=MOST_SPLITS.min(PLACES).min(key_blocks)).filter(is_eligible);
    let best = eligible().map(efficiency).fold(0.0, f32::max);
    eligible().find(|&splits| f64::from(efficiency(splits)) >= 0.85 * f64::from(best)).unwrap_or(1)
}

/// Up to this many indices the gradient of an embedding is added up without sorting them.
pub(crate) const UNSORTED_INDICES: u64 = 3072;

/// The buffers of the radix sort of 64-bit keys with 64-bit values: a second copy of both, a histogram for each of eight
/// passes, and for each tile a state of each digit. Every part is a multiple of 256 bytes.
pub(crate) fn sort_pairs(items: u64) -> u64 {
    const ALIGNMENT: u64 = 256;
    const TILE: u64 = 4608;
    const HISTOGRAMS: u64 = 8 * 256 * 8;
    const PASS_COUNTERS: u64 = ALIGNMENT;
    const TILE_STATES: u64 = 256 * 4;
    ALIGNMENT - 1 + 2 * round_up(8 * items, ALIGNMENT) + HISTOGRAMS + PASS_COUNTERS + items.div_ceil(TILE) * TILE_STATES
}

/// The buffer of the sort of a few indices, which one thread block does alone, or of many.
pub(crate) fn sort_indices(items: u64) -> u64 {
    const MOST_IN_ONE_TILE: u64 = 2304;
    if items <= MOST_IN_ONE_TILE { 1 } else { sort_pairs(items) }
}

/// Up to this many numbers `torch.sort` sorts a row in one thread block, without a buffer.
pub(crate) const MOST_SORTED_IN_ONE_BLOCK: u64 = 4096;

/// The buffer of a cumulative sum over a few 32-bit numbers.
pub(crate) const CUMULATIVE_SUM: u64 = 1023;

/// The workspace of a product of several groups: 512 bytes for each multiprocessor.
pub(crate) const GROUPED_PRODUCT: u64 = 512 * MULTIPROCESSORS;

/// The arguments of such a product: pointers, strides and sizes of each group.
pub(crate) fn group_arguments(groups: u32) -> u64 {
    const PER_GROUP: u64 = 60;
    PER_GROUP * u64::from(groups)
}

/// The buffer of the scan that finds the distinct sorted indices (`unique_by_key`).
pub(crate) fn scan_for_distinct(items: u64) -> u64 {
    const TILE: u64 = 4480;
    scan(items.div_ceil(TILE))
}

/// The buffer of the scan that adds up how many parts each segment of indices has.
pub(crate) fn scan_sums(items: u64) -> u64 {
    const TILE: u64 = 896;
    scan(items.div_ceil(TILE))
}

/// The buffer of a scan over `tiles` tiles: a state for each tile, and 32 more for the look-back.
fn scan(tiles: u64) -> u64 {
    const ALIGNMENT: u64 = 256;
    ALIGNMENT - 1 + ALIGNMENT + round_up((tiles + 32) * 16, ALIGNMENT)
}

/// How many partial sums the gradient of an embedding is split into: at most ten indices each.
pub(crate) fn embedding_segments(indices: u64, table_rows: u64) -> u64 {
    const INDICES_PER_THREAD: u64 = 10;
    indices / INDICES_PER_THREAD + indices.min(table_rows)
}

/// Whether the partial sums of an embedding's gradient are added to the table at once, because its few rows would not
/// fill the GPU otherwise.
pub(crate) fn embedding_adds_at_once(indices: u64, table_rows: u64, width: u64) -> bool {
    const WARP: u64 = 32;
    const MOST_THREADS: u64 = 1024;
    const BLOCKS_PER_MULTIPROCESSOR: u64 = 4;
    let threads = round_up(width, WARP);
    let blocks = (indices.min(table_rows) * threads).div_ceil(threads.min(MOST_THREADS));
    blocks < MULTIPROCESSORS * BLOCKS_PER_MULTIPROCESSOR && embedding_segments(indices, table_rows) > 4 * blocks
}

/// Bytes that a thread block of FSDP's copies moves at once (`BLOCK_SIZE` times `BYTES_PER_THREAD` in TensorShape.cu).
const COPIED_BY_BLOCK: u64 = 128 * 16;
/// Bytes of an entry of their tables.
const TABLE_ENTRY: u64 = 8;

/// The table of the copy from a gathered buffer to its tensors, of which each rank sent parts of these bytes
/// (`split_with_sizes_copy_out_cuda_contiguous_no_cast`): a tensor for each thread block, and four numbers for each tensor.
pub(crate) fn split_copy_table(parts: &[u64], ranks: u64) -> u64 {
    const THREADS_PER_BLOCK: u64 = 128;
    const WAVES: u64 = 2;
    let blocks = |iterations: u64| parts.iter().map(|part| part.div_ceil(COPIED_BY_BLOCK * iterations)).sum::<u64>();
    let most_blocks = MULTIPROCESSORS * THREADS_PER_MULTIPROCESSOR / THREADS_PER_BLOCK * WAVES;
    let factor = (blocks(1) * ranks).div_ceil(most_blocks);
    let root = factor.isqrt();
    let ranks_per_block = (if root * root < factor { root + 1 } else { root }).min(ranks);
    let iterations = factor.div_ceil(ranks_per_block);
    (4 * parts.len() as u64 + 1 + blocks(iterations)) * TABLE_ENTRY
}

/// The table of the copy of gradients to the buffer that is reduced, with parts of these bytes for each rank
/// (`get_chunk_cat_metadata`): a tensor for each thread block, and six numbers for each tensor.
pub(crate) fn chunk_cat_table(parts: &[u64]) -> u64 {
    let blocks: u64 = parts.iter().map(|part| part.div_ceil(COPIED_BY_BLOCK)).sum();
    (6 * parts.len() as u64 + 2 + blocks) * TABLE_ENTRY
}

/// How many rows of partial sums a layer norm's scale and shift gradients are split into, if they are: where there are
/// many tokens and too few columns to fill the GPU.
pub(crate) fn norm_partial_rows(tokens: u64, width: u64) -> Option<u64> {
    const COLUMNS_PER_BLOCK: u64 = 32;
    const ROWS_PER_BLOCK: u64 = 32;
    const MOST_BLOCKS: u64 = 32 * 1024;
    (tokens > 64 * 1024 && width / COLUMNS_PER_BLOCK < MULTIPROCESSORS / 2)
        .then(|| (MOST_BLOCKS / width.div_ceil(COLUMNS_PER_BLOCK)).min(tokens.div_ceil(ROWS_PER_BLOCK)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes from recordings of PyTorch 2.11 on an H200: gradients of biases of 768, 2304 and 3072 numbers.
    #[test]
    fn split_reduction_as_recorded() {
        let scratch = |rows, columns| sum_over_rows(rows, columns).map(|s| (s.partial_sums, s.counters));
        assert_eq!(scratch(8192, 768), Some((50_331_648, 24)));
        assert_eq!(scratch(8192, 3072), Some((138_412_032, 96)));
        assert_eq!(scratch(8192, 2304), Some((139_198_464, 72)));
        assert_eq!(scratch(804, 768), None);
        assert_eq!(scratch(8, 1024 * 768), None);
    }

    /// The mean of the scales of a 4-bit weight, in a rehearsal of bitsandbytes.
    #[test]
    fn sum_of_all_as_rehearsed() {
        assert_eq!(sum_of_all(262_144, 4), Some(ReductionScratch { partial_sums: 128, counters: 4 }));
        assert_eq!(sum_of_all(65_536, 4), None);
    }

    /// Sizes from rehearsals of PyTorch 2.11.
    #[test]
    fn argmax_as_rehearsed() {
        let scratch = |rows, columns| argmax_of_rows(rows, columns).map(|s| (s.partial_sums, s.counters));
        assert_eq!(scratch(1, 130_560), None);
        assert_eq!(scratch(1, 130_561), Some((256, 4)));
        assert_eq!(scratch(3, 151_936), Some((912, 12)));
        assert_eq!(scratch(64, 300_000), Some((9216, 256)));
    }

    #[test]
    fn index_sort_as_recorded() {
        for (items, bytes) in [(3152, 68_607), (3724, 77_823), (4164, 84_991), (4830, 96_255), (8192, 150_015)] {
            assert_eq!(sort_pairs(items), bytes, "{items}");
            assert_eq!((scan_for_distinct(items), scan_sums(items)), (1279, 1279), "{items}");
        }
        // From rehearsals.
        for (items, distinct, sums) in [(43_000, 1279, 1791), (71_000, 1279, 2303), (144_000, 1791, 3839)] {
            assert_eq!((scan_for_distinct(items), scan_sums(items)), (distinct, sums), "{items}");
        }
        assert_eq!(embedding_segments(8192, 50_257) * 768 * 4, 27_681_792);
    }

    /// Sizes from rehearsals of `fully_shard` on a reference GPT with PyTorch 2.11. Its blocks have 12 weights.
    #[test]
    fn tables_of_copies_as_rehearsed() {
        let parts = |width: u64, ranks: u64, number: u64| {
            let matrix = |rows: u64, columns: u64| rows / ranks * columns * number;
            let [vector, wide] = [1, 4].map(|factor| matrix(factor * width, 1));
            let out = [matrix(width, width), vector];
            let attention = [[vector; 2], [matrix(3 * width, width), matrix(3 * width, 1)], out].concat();
            [attention, vec![vector, vector, matrix(4 * width, width), wide, matrix(width, 4 * width), vector]].concat()
        };
        assert_eq!(split_copy_table(&parts(192, 2, 4), 2), 3912);
        assert_eq!(split_copy_table(&parts(192, 2, 2), 2), 2184);
        assert_eq!(chunk_cat_table(&parts(192, 2, 4)), 4112);
        // A thread block copies more than once, and from several ranks.
        assert_eq!(split_copy_table(&parts(1024, 8, 2), 8), 6600);
        assert_eq!(chunk_cat_table(&parts(1024, 8, 4)), 25_232);
    }

    /// Splits of rehearsals of PyTorch 2.11.
    #[test]
    fn flash_attention_is_split_where_it_does_not_fill_the_gpu() {
        assert_eq!(flash_splits(3, 1100, 64), 3);
        assert_eq!(flash_splits(12, 200, 160), 4);
        assert_eq!(flash_splits(12, 200, 64), 1);
        assert_eq!(flash_splits(96, 1024, 64), 1);
        assert_eq!((flash_head_width(64), flash_head_width(40), flash_head_width(160)), (64, 64, 192));
    }

    #[test]
    fn attention_as_recorded() {
        let single = |heads, length, width| memory_efficient_backward(heads, length, width, NumberFormat::Single);
        assert_eq!((single(96, 1024, 64), single(48, 446, 64)), (25_190_400, 48 * 114_800));
        // From rehearsals.
        let half = |width| memory_efficient_backward(6, 300, width, NumberFormat::Half);
        assert_eq!((single(6, 300, 80), half(80)), (1_180_224, 1_179_936));
        assert_eq!((half(64), half(136), half(256)), (492_000, 5_702_496, 6_292_608));
        assert_eq!(cudnn_backward(96, 1024, 64), 25_559_296);
    }
}
