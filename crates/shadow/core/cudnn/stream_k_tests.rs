//! Plans measured on an H200, with and without the GPU.

use super::{
    convolutions::{Convolution, ConvolutionOperation},
    stream_k::{Knobs, Workspace, workspace},
};

/// A plan's knobs as cuDNN writes them: tile, reduction tile, cluster, workspace.
fn json(knobs: [u32; 5]) -> String {
    let names = ["TILE_SIZE", "TILEK", "TILE_CGA_M", "TILE_CGA_N", "WORKSPACE"];
    let parts = names.iter().zip(knobs).map(|(name, value)| format!("\"CUDNN_KNOB_TYPE_{name}\":{value}"));
    format!("{{\"engine\":{{\"knobChoices\":{{{}}}}}}}", parts.collect::<Vec<_>>().join(","))
}

/// Batch, channels, filters, groups; then axes and, for each of them, input, kernel, stride, padding, dilation.
fn convolution(operation: ConvolutionOperation, half: bool, sizes: [u64; 4], axes: [u64; 6]) -> Convolution {
    let [batch, channels, filters, groups] = sizes;
    let per_axis = |value, absent| std::array::from_fn(|axis| if (axis as u64) < axes[0] { value } else { absent });
    Convolution {
        operation,
        half,
        channels_last: true,
        batch,
        channels,
        filters,
        groups,
        input: per_axis(axes[1], 1),
        kernel: per_axis(axes[2], 1),
        stride: per_axis(axes[3], 1),
        padding: per_axis(axes[4], 0),
        dilation: per_axis(axes[5], 1),
    }
}

/// Type (0 float32, 1 float16, 2 bfloat16), sizes, axes, knobs, bytes without a GPU, bytes on the H200.
type Row = (ConvolutionOperation, u32, [u64; 4], [u64; 6], [u32; 5], u64, u64);

#[test]
fn measured_plans() {
    use ConvolutionOperation::{Data, Filter, Forward};
    let rows: [Row; 20] = [
        // Copies of all three tensors show that the answer without a GPU has eight parts, not nine.
        (Filter, 0, [32, 512, 2048, 1], [2, 7, 1, 1, 0, 1], [1, 0, 1, 2, 0], 16_515_307, 16_056_336),
        (Data, 1, [1, 768, 384, 1], [2, 40, 3, 1, 1, 1], [7, 1, 8, 2, 1], 131, 0),
        (Forward, 0, [4, 16, 4, 1], [2, 24, 5, 1, 2, 1], [5, 0, 7, 1, 0], 131, 0),
        (Filter, 1, [48, 256, 256, 1], [2, 160, 3, 2, 1, 1], [3, 1, 1, 2, 0], 787_611_664, 804_127_399),
        (Forward, 2, [12, 160, 160, 1], [2, 32, 4, 1, 1, 1], [0, 1, 4, 2, 0], 131, 0),
        (Data, 0, [8, 128, 64, 1], [2, 80, 3, 1, 0, 1], [0, 0, 4, 1, 0], 38_969_491, 44_212_563),
        (Filter, 0, [17, 160, 640, 1], [2, 64, 1, 2, 0, 1], [5, 0, 1, 1, 0], 0, 1_966_599),
        (Data, 1, [24, 384, 192, 1], [2, 20, 5, 1, 2, 1], [3, 1, 1, 1, 1], 14_745_747, 14_745_616),
        (Forward, 1, [2, 256, 1024, 1], [2, 28, 3, 1, 0, 1], [18, 1, 8, 1, 1], 8_290_451, 8_290_320),
        (Forward, 0, [48, 320, 1280, 1], [2, 7, 3, 1, 1, 1], [9, 0, 4, 1, 0], 1_048_771, 0),
        (Filter, 2, [8, 128, 32, 1], [2, 128, 3, 1, 1, 1], [7, 1, 1, 6, 0], 42_016_784, 45_163_007),
        (Filter, 2, [16, 192, 96, 1], [2, 112, 3, 1, 1, 1], [1, 1, 1, 5, 0], 115_937_296, 118_886_935),
        (Filter, 0, [1, 256, 256, 1], [2, 160, 3, 2, 0, 1], [0, 0, 1, 1, 0], 0, 7_078_479),
        (Forward, 1, [3, 2048, 2048, 1], [2, 14, 3, 1, 1, 1], [1, 1, 1, 8, 0], 80_314_515, 84_247_183),
        (Data, 1, [6, 256, 256, 1], [2, 24, 3, 1, 1, 1], [1, 1, 1, 4, 0], 131, 0),
        // Seven parts would leave the same work to some part as six.
        (Data, 1, [1, 512, 256, 1], [2, 128, 3, 1, 0, 1], [7, 1, 8, 2, 0], 131, 3_146_275),
        (Filter, 2, [32, 2048, 2048, 1], [2, 14, 1, 1, 0, 1], [3, 1, 1, 3, 0], 51_380_371, 65_536_499),
        (Forward, 0, [1, 256, 512, 1], [2, 64, 4, 1, 2, 1], [0, 0, 1, 2, 0], 21_235_859, 29_624_991),
        // Fifteen parts of the smallest reduction tile: five of 72 half steps each.
        (Forward, 1, [2, 256, 1024, 1], [2, 28, 3, 1, 0, 1], [0, 0, 8, 1, 0], 8_290_451, 16_155_279),
        (Filter, 2, [8, 192, 192, 1], [2, 112, 1, 2, 0, 1], [5, 1, 2, 4, 0], 48_168_976, 48_693_487),
    ];
    for (operation, kind, sizes, axes, knobs, without, measured) in rows {
        let convolution = convolution(operation, kind > 0, sizes, axes);
        let knobs = Knobs::of_json(&json(knobs)).unwrap();
        let answer = workspace(without, knobs, &convolution, kind == 2, 132).map(|answer| answer.bytes);
        assert_eq!(answer, Some(measured), "{operation:?} {sizes:?} {axes:?} {knobs:?}");
    }
}

#[test]
fn the_answer_without_a_gpu_is_that_of_18_multiprocessors() {
    let convolution = convolution(ConvolutionOperation::Filter, false, [1, 256, 256, 1], [2, 160, 3, 2, 0, 1]);
    let knobs = Knobs::of_json(&json([0, 0, 1, 1, 0])).unwrap();
    let answer = |without, multiprocessors| workspace(without, knobs, &convolution, false, multiprocessors);
    assert_eq!(answer(0, 18), Some(Workspace { bytes: 0, fitted: false }));
    assert_eq!(answer(0, 132), Some(Workspace { bytes: 7_078_479, fitted: true }));
    // More multiprocessors take more parts of the 36 tiles.
    assert_eq!(answer(0, 144).map(|answer| answer.bytes / 65_536), Some(144));
}

#[test]
fn plans_of_other_kernels_stay_as_they_are() {
    assert!(Knobs::of_json("{\"engine\":{\"knobChoices\":{\"CUDNN_KNOB_TYPE_WORKSPACE\":0}}}").is_none());
    let convolution = convolution(ConvolutionOperation::Forward, true, [8, 64, 64, 1], [2, 32, 3, 1, 1, 1]);
    let unknown_tile = Knobs::of_json(&json([99, 0, 1, 1, 0])).unwrap();
    assert_eq!(workspace(131, unknown_tile, &convolution, false, 132), None);
}
