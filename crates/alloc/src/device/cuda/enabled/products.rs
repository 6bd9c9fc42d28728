//! Matrix products and attention through cuBLAS, over the operands where these are long enough,
//! otherwise over scratch memory.
//!
//! Attention is the batched products of a fused kernel, with the same memory traffic: the scores
//! are one matrix for all heads, which stays in the cache as a fused kernel's tiles do, and only
//! queries, keys, values and results are moved. A forward pass is two such products, a backward
//! pass five.
//!
//! Without cuBLAS nothing is multiplied: the stream is kept busy for as long as an H200 would be,
//! and [`matrix_library`](super::matrix_library) returns the reason.

use cudarc::driver::sys::CUresult;

use super::{
    CudaDevice,
    blas::{self, BlasError, BlasProduct, Matrix},
    context::{self, device_error},
    kernels::Kernel,
    work::{MOST_STAND_IN_BYTES, WORKSPACE_BYTES},
};
use crate::device::{CallKind, DeviceError, sim::Profile};
use oomph_base::{Address, Dtype, MIB, ProductRole, StreamId, Work};

/// cuBLAS wants this boundary for its fastest kernels, and every usual allocator gives it.
const BOUNDARY: u64 = 16;
/// The most that the scores of one head may take; longer rows are multiplied in pieces.
const MOST_SCORE_BYTES: u64 = 64 * MIB;
/// Pieces of rows are a multiple of this many numbers.
const PIECE_STEP: u64 = 8;
/// With less free memory than this, a handle that cannot be made means out of memory, whatever
/// cuBLAS reports.
const ROOM_FOR_A_HANDLE: u64 = 256 * MIB;

/// The address and size of an operand.
pub(super) type Operand = (Address, u64);

/// Sizes of a product before it has memory.
#[derive(Clone, Copy, Debug)]
struct ProductShape {
    m: u64,
    n: u64,
    k: u64,
    batch: u64,
    dtype: Dtype,
    role: ProductRole,
}

/// Whether every product of a batch has a left matrix of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScoreSharing {
    Own,
    Shared,
}

impl ProductShape {
    fn of(work: &Work) -> Option<ProductShape> {
        let Work::Gemm { m, n, k, batch, dtype, role } = *work else { return None };
        let [m, n, k, batch] = [m, n, k, batch].map(u64::from);
        Some(ProductShape { m, n, k, batch, dtype, role })
    }

    fn left_bytes(self) -> u64 {
        self.matrix_bytes(self.m, self.k)
    }

    fn right_bytes(self) -> u64 {
        self.matrix_bytes(self.n, self.k)
    }

    fn result_bytes(self) -> u64 {
        self.matrix_bytes(self.m, self.n)
    }

    fn matrix_bytes(self, rows: u64, columns: u64) -> u64 {
        self.dtype.bytes().saturating_mul(rows).saturating_mul(columns).saturating_mul(self.batch)
    }

    /// The product of matrices at these places; `None` where a size is more than the library can
    /// take.
    fn at(self, left: u64, right: u64, result: u64) -> Option<BlasProduct> {
        let length = |size: u64| i32::try_from(size).ok();
        let matrix = |address, rows: u64, columns: u64| {
            Some(Matrix { address, step: i64::try_from(rows.checked_mul(columns)?).ok()? })
        };
        Some(BlasProduct {
            m: length(self.m)?,
            n: length(self.n)?,
            k: length(self.k)?,
            batch: length(self.batch)?,
            dtype: self.dtype,
            role: self.role,
            left: matrix(left, self.m, self.k)?,
            right: matrix(right, self.n, self.k)?,
            result: matrix(result, self.m, self.n)?,
        })
    }
}

/// Attention as products: how many of which shape, and into how many pieces their rows are cut.
#[derive(Clone, Copy, Debug)]
struct AttentionPlan {
    whole: ProductShape,
    piece: u64,
    products: u64,
}

impl AttentionPlan {
    fn of(work: &Work) -> Option<AttentionPlan> {
        let Work::Attention { batch, heads, queries, keys, head_width, dtype, backward, causal } = *work else {
            return None;
        };
        // With a mask each query meets half of the keys.
        let seen = if causal { u64::from(keys).div_ceil(2) } else { u64::from(keys) };
        let row_bytes = u64::from(queries).saturating_mul(dtype.bytes()).max(1);
        let most = (MOST_SCORE_BYTES / row_bytes / PIECE_STEP * PIECE_STEP).max(PIECE_STEP);
        let whole = ProductShape {
            m: queries.into(),
            n: head_width.into(),
            k: seen,
            batch: u64::from(batch) * u64::from(heads),
            dtype,
            role: ProductRole::Output,
        };
        Some(AttentionPlan { whole, piece: seen.min(most), products: if backward { 5 } else { 2 } })
    }
}

/// Whether a matrix of that size fits at the start of an operand.
fn fits(operand: &Operand, bytes: u64) -> bool {
    operand.1 >= bytes && operand.0.0.is_multiple_of(BOUNDARY)
}

/// The `number`-th piece of that size in the operands, starting over at the end; `None` where no
/// operand has one.
fn piece_of(operands: &[Operand], bytes: u64, number: u64) -> Option<u64> {
    let pieces = |operand: &Operand| if fits(operand, bytes) { operand.1.checked_div(bytes).unwrap_or(0) } else { 0 };
    let all: u64 = operands.iter().map(pieces).sum();
    let mut left = number.checked_rem(all)?;
    for operand in operands {
        if left < pieces(operand) {
            let address = operand.0.0 + left * bytes;
            // An unaligned piece would be multiplied by a slower kernel than a real matrix.
            return Some(if address.is_multiple_of(BOUNDARY) { address } else { operand.0.0 });
        }
        left -= pieces(operand);
    }
    None
}

impl CudaDevice {
    /// Queues a matrix product or attention. The last operand is the result.
    pub(super) fn multiply(&mut self, stream: StreamId, work: &Work, operands: &[Operand]) -> Result<(), DeviceError> {
        if blas::blas().is_err() {
            return self.spin_instead(stream, work);
        }
        let (inputs, results) = operands.split_at(operands.len().saturating_sub(1));
        match AttentionPlan::of(work) {
            Some(plan) => self.attend(stream, work, plan, inputs, results),
            None => {
                let Some(shape) = ProductShape::of(work) else { return Ok(()) };
                let place = |operand: Option<&Operand>, bytes| {
                    operand.filter(|operand| fits(operand, bytes)).map(|operand| operand.0.0)
                };
                let places = [
                    place(inputs.first(), shape.left_bytes()),
                    place(inputs.get(1), shape.right_bytes()),
                    place(results.first(), shape.result_bytes()),
                ];
                match self.prepare(stream, shape, ScoreSharing::Own, places)? {
                    Some(product) => self.queue_product(stream, &product),
                    None => self.spin_instead(stream, work),
                }
            }
        }
    }

    /// Queues the products of attention.
    fn attend(
        &mut self,
        stream: StreamId,
        work: &Work,
        plan: AttentionPlan,
        inputs: &[Operand],
        results: &[Operand],
    ) -> Result<(), DeviceError> {
        for number in 0..plan.products {
            let mut done = 0;
            while done < plan.whole.k {
                let shape = ProductShape { k: plan.piece.min(plan.whole.k - done), ..plan.whole };
                let right = piece_of(inputs, shape.right_bytes(), number);
                let result = piece_of(results, shape.result_bytes(), number);
                match self.prepare(stream, shape, ScoreSharing::Shared, [None, right, result])? {
                    Some(product) => self.queue_product(stream, &product)?,
                    // The first piece is the largest: nothing was queued yet.
                    None => return self.spin_instead(stream, work),
                }
                done += shape.k;
            }
        }
        Ok(())
    }

    /// A product with scratch memory for missing operands; `None` where that would be too much.
    fn prepare(
        &mut self,
        stream: StreamId,
        shape: ProductShape,
        scores: ScoreSharing,
        [left, right, result]: [Option<u64>; 3],
    ) -> Result<Option<BlasProduct>, DeviceError> {
        let left_bytes = match scores {
            ScoreSharing::Own => shape.left_bytes(),
            ScoreSharing::Shared => ProductShape { batch: 1, ..shape }.left_bytes(),
        };
        let needed = |place: Option<u64>, bytes: u64| if place.is_none() { bytes } else { 0 };
        let sources = needed(left, left_bytes).max(needed(right, shape.right_bytes()));
        let results = needed(result, shape.result_bytes());
        if sources.max(results) > MOST_STAND_IN_BYTES || shape.at(0, 0, 0).is_none() {
            return Ok(None);
        }
        let source = if sources > 0 { self.source(stream, sources)? } else { 0 };
        let sink = if results > 0 { self.sink(results)? } else { 0 };
        let product = shape.at(left.unwrap_or(source), right.unwrap_or(source), result.unwrap_or(sink));
        Ok(product.map(|product| match scores {
            ScoreSharing::Own => product,
            ScoreSharing::Shared => BlasProduct { left: Matrix { step: 0, ..product.left }, ..product },
        }))
    }

    /// Keeps the stream busy for as long as an H200 would be.
    fn spin_instead(&mut self, stream: StreamId, work: &Work) -> Result<(), DeviceError> {
        let nanos = Profile::h200().duration(work).0;
        self.queue(stream, Kernel::Spin { nanos })
    }

    /// Scratch memory to read numbers from.
    fn source(&mut self, stream: StreamId, bytes: u64) -> Result<u64, DeviceError> {
        let call = CallKind::Launch;
        self.enter(call)?;
        let found = self.scratch.source(bytes);
        let ((address, bytes), is_new) = found.map_err(|code| device_error(call, bytes, code))?;
        if is_new {
            self.queue(stream, Kernel::numbers(address, bytes))?;
            // Other streams may be the next to read it.
            self.drive(call, 0, context::synchronize)?;
        }
        Ok(address)
    }

    /// Scratch memory to write to.
    pub(super) fn sink(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        let call = CallKind::Launch;
        self.enter(call)?;
        self.scratch.result(bytes).map(|piece| piece.0).map_err(|code| device_error(call, bytes, code))
    }

    /// Queues a product with cuBLAS, whose handle is made at the first.
    fn queue_product(&mut self, stream: StreamId, product: &BlasProduct) -> Result<(), DeviceError> {
        let call = CallKind::Launch;
        let on_stream = self.stream(call, stream)?;
        self.enter(call)?;
        let workspace = self.scratch.workspace(stream.index());
        let workspace = workspace.map_err(|code| device_error(call, WORKSPACE_BYTES, code))?;
        let context = self.context;
        // Made outside of the call that is measured: it takes longer than thousands of products.
        context.make_handle().map_err(explain)?;
        let mut failure = None;
        let queued = self.drive(call, 0, || match context.multiply(on_stream, workspace, product) {
            Ok(()) => CUresult::CUDA_SUCCESS,
            Err(error) => {
                failure = Some(error);
                CUresult::CUDA_ERROR_UNKNOWN
            }
        });
        queued.map_err(|other| failure.map_or(other, explain))
    }
}

/// A cuBLAS error as a device error.
fn explain(error: BlasError) -> DeviceError {
    let call = CallKind::Launch;
    let short = || context::memory_info().is_ok_and(|(free, _)| free < ROOM_FOR_A_HANDLE);
    if error.is_out_of_memory() || error.concerns_the_handle() && short() {
        return DeviceError::OutOfMemory { call, requested: ROOM_FOR_A_HANDLE };
    }
    DeviceError::Driver { call, name: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attention(queries: u32, backward: bool, causal: bool) -> Work {
        Work::Attention {
            batch: 2,
            heads: 3,
            queries,
            keys: queries,
            head_width: 64,
            dtype: Dtype::Bf16,
            backward,
            causal,
        }
    }

    #[test]
    fn attention_is_as_much_arithmetic_as_its_products() {
        for (backward, causal) in [(false, false), (true, false), (false, true), (true, true)] {
            let work = attention(1024, backward, causal);
            let plan = AttentionPlan::of(&work).unwrap();
            let ProductShape { m, n, k, batch, .. } = plan.whole;
            let flops = 2 * m * n * k * batch * plan.products;
            assert_eq!(flops as f64, work.flops(), "{work:?}");
        }
    }

    #[test]
    fn long_rows_of_scores_are_cut_into_pieces_that_fit() {
        let plan = AttentionPlan::of(&attention(65_536, false, false)).unwrap();
        let piece = ProductShape { k: plan.piece, batch: 1, ..plan.whole };
        assert!(piece.left_bytes() <= MOST_SCORE_BYTES && plan.piece.is_multiple_of(PIECE_STEP), "{plan:?}");
        assert_eq!(AttentionPlan::of(&attention(1024, false, false)).unwrap().piece, 1024);
    }

    #[test]
    fn pieces_go_round_in_the_operands_that_are_long_enough() {
        let operands = [(Address(0x1000), 300), (Address(0x2000), 16), (Address(0x3000), 160)];
        let places: Vec<_> = (0..4).map(|number| piece_of(&operands, 160, number)).collect();
        assert_eq!(places, [Some(0x1000), Some(0x3000), Some(0x1000), Some(0x3000)]);
        assert_eq!(piece_of(&operands, 400, 0), None);
        assert_eq!(piece_of(&[(Address(0x1001), 300)], 160, 0), None, "no place for a matrix");
        assert_eq!(piece_of(&[], 1, 3), None);
        assert_eq!(piece_of(&operands, 0, 3), None);
    }

    #[test]
    fn sizes_that_the_library_cannot_take_are_no_product() {
        let shape = ProductShape { m: 1 << 31, n: 1, k: 1, batch: 1, dtype: Dtype::F32, role: ProductRole::Output };
        assert_eq!(shape.at(0, 0, 0), None);
        assert_eq!(ProductShape { m: u64::MAX, ..shape }.left_bytes(), u64::MAX);
        assert!(ProductShape { m: 8, ..shape }.at(0, 0, 0).is_some());
    }
}
