//! How many blocks a multiprocessor holds, and attributes of kernels.
//!
//! Registers of PyTorch's own kernels are in compressed device code and not known: 32 per thread are assumed, which does not
//! limit the occupancy of any card. Those of loaded modules are known (`modules`).

use crate::{
    arguments::Out,
    card::card,
    errors::SUCCESS,
    modules,
    properties::{self, RESERVED_SHARED, limits},
};

const MAX_THREADS_PER_BLOCK: i32 = 1024;
const REGISTERS: i32 = 32;

/// Blocks per multiprocessor by threads and by shared memory.
fn active_blocks(block: i32, shared: u64) -> i32 {
    let limits = limits();
    if block <= 0 || block > MAX_THREADS_PER_BLOCK {
        return 0;
    }
    let by_threads = limits.threads_per_multiprocessor / (block as u32).next_multiple_of(32) as i32;
    let by_shared = limits.shared_per_multiprocessor as u64 / (shared + RESERVED_SHARED as u64);
    by_threads.min(limits.blocks_per_multiprocessor).min(by_shared.min(i32::MAX as u64) as i32)
}

fn blocks(answer: Out<i32>, block: i32, shared: u64) -> i32 {
    answer.set(active_blocks(block, shared));
    SUCCESS
}

/// The largest block with the most threads per multiprocessor.
fn best_block(grid: Out<i32>, block: Out<i32>, limit: i32) -> i32 {
    let size = if limit > 0 { limit.min(MAX_THREADS_PER_BLOCK) } else { MAX_THREADS_PER_BLOCK };
    block.set(size);
    grid.set(active_blocks(size, 0).max(1) * card().multiprocessors);
    SUCCESS
}

fn function_attributes(target: Out<u8>) -> i32 {
    const STRUCTURE: &str = "cudaFuncAttributes";
    let major = properties::runtime_major();
    target.zero(properties::size_of(STRUCTURE, major));
    let set = |field: &str, value: i32| properties::set_field(target, STRUCTURE, major, field, value as u64, 4);
    let capability = card().major * 10 + card().minor;
    set("maxThreadsPerBlock", MAX_THREADS_PER_BLOCK);
    set("numRegs", REGISTERS);
    set("ptxVersion", capability);
    set("binaryVersion", capability);
    set("maxDynamicSharedSizeBytes", 49_152);
    SUCCESS
}

/// `CUfunction_attribute`.
fn function_attribute(value: Out<i32>, number: i32, function: u64) -> i32 {
    let needs = || modules::needs_of(function);
    value.set(match number {
        0 => MAX_THREADS_PER_BLOCK,
        3 => needs().map_or(0, |needs| needs.local_bytes as i32),
        4 => needs().map_or(REGISTERS, |needs| needs.registers as i32),
        5 | 6 => card().major * 10 + card().minor,
        8 => 49_152,
        _ => 0,
    });
    SUCCESS
}

/// Clusters of two blocks on every pair of multiprocessors.
fn active_clusters(answer: Out<i32>) -> i32 {
    answer.set(card().multiprocessors / 2);
    SUCCESS
}

cuda_functions! {
    fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(answer: Out<i32>, _function: u64, block: i32, shared: u64) -> i32 { blocks(answer, block, shared) }
    fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(answer: Out<i32>, _function: u64, block: i32, shared: u64, _flags: u32) -> i32 { blocks(answer, block, shared) }
    fn cudaOccupancyAvailableDynamicSMemPerBlock(bytes: Out<u64>, _function: u64, count: i32, _block: i32) -> i32 {
        bytes.set((limits().shared_per_multiprocessor / count.max(1) - RESERVED_SHARED).max(0) as u64);
        SUCCESS
    }
    fn cudaOccupancyMaxActiveClusters(answer: Out<i32>, _function: u64, _configuration: u64) -> i32 { active_clusters(answer) }
    fn cudaOccupancyMaxPotentialClusterSize(answer: Out<i32>, _function: u64, _configuration: u64) -> i32 { answer.set(8); SUCCESS }
    fn cudaFuncGetAttributes(target: Out<u8>, _function: u64) -> i32 { function_attributes(target) }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(answer: Out<i32>, _function: u64, block: i32, shared: u64) -> i32 { blocks(answer, block, shared) }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(answer: Out<i32>, _function: u64, block: i32, shared: u64, _flags: u32) -> i32 { blocks(answer, block, shared) }
    fn cuOccupancyMaxPotentialBlockSize(grid: Out<i32>, block: Out<i32>, _function: u64, _shared: u64, _bytes: u64, limit: i32) -> i32 { best_block(grid, block, limit) }
    fn cuOccupancyMaxPotentialBlockSizeWithFlags(grid: Out<i32>, block: Out<i32>, _function: u64, _shared: u64, _bytes: u64, limit: i32) -> i32 { best_block(grid, block, limit) }
    fn cuOccupancyMaxActiveClusters(answer: Out<i32>, _function: u64, _configuration: u64) -> i32 { active_clusters(answer) }
    fn cuOccupancyMaxPotentialClusterSize(answer: Out<i32>, _function: u64, _configuration: u64) -> i32 { answer.set(8); SUCCESS }
    fn cuFuncGetAttribute(value: Out<i32>, number: i32, function: u64) -> i32 { function_attribute(value, number, function) }
    fn cuKernelGetAttribute(value: Out<i32>, number: i32, kernel: u64, _device: i32) -> i32 { function_attribute(value, number, kernel) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_limited_by_threads_and_shared_memory() {
        assert_eq!(
            (active_blocks(1024, 0), active_blocks(33, 0), active_blocks(0, 0), active_blocks(2000, 0)),
            (2, 32, 0, 0)
        );
        assert_eq!(active_blocks(128, 100 << 10), 2);
        assert_eq!(active_blocks(128, 240 << 10), 0);
    }
}
