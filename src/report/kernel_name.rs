//! Short names of kernels.

/// The last name of a mangled C++ function, without its namespaces and template arguments: `multi_tensor_apply_kernel` for
/// `_ZN2at6native25multi_tensor_apply_kernelINS1_...`. Other names stay as they are.
pub(super) fn kernel_name(mangled: &str) -> &str {
    let Some(mut rest) = mangled.strip_prefix("_Z") else { return mangled };
    rest = rest.strip_prefix('N').unwrap_or(rest);
    let mut last = None;
    loop {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let Ok(length) = rest[..digits].parse::<usize>() else { break };
        let Some(name) = rest.get(digits..digits + length) else { break };
        if !name.starts_with("_GLOBAL__N") {
            last = Some(name);
        }
        rest = &rest[digits + length..];
    }
    last.unwrap_or(mangled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_and_arguments_are_left_out() {
        let mangled = "_ZN2at6native54_GLOBAL__N__f8a10d72_21_ForeachPointwiseOp_cu_ef478fac25multi_tensor_apply_kernelINS1_8TensorIfEEEvT_";
        assert_eq!(kernel_name(mangled), "multi_tensor_apply_kernel");
        assert_eq!(kernel_name("_Z6kernelPf"), "kernel");
        for other in ["triton_poi_fused_0", "", "_Z", "_ZN99short", "_ZTV5Class"] {
            assert_eq!(kernel_name(other), other);
        }
    }
}
