//! Several things at once.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// What `work` makes of each item, in the order of the items, on up to `jobs` threads. An item is begun when a thread is
/// free, so that no more of them are at work, and in memory, than there are threads.
pub fn side_by_side<T: Sync, R: Send>(items: &[T], jobs: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, R)>> = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, items.len().max(1)) {
            scope.spawn(|| {
                while let Some((number, item)) = numbered(items, next.fetch_add(1, Ordering::Relaxed)) {
                    let result = work(item);
                    done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((number, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}

fn numbered<T>(items: &[T], number: usize) -> Option<(usize, &T)> {
    Some((number, items.get(number)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_items_whoever_makes_them() {
        for count in [50, 100] {
            let items: Vec<u64> = (0..count).collect();
            let doubled: Vec<u64> = items.iter().map(|item| item * 2).collect();
            for jobs in [0, 1, 3, 100, 200] {
                assert_eq!(side_by_side(&items, jobs, |item| item * 2), doubled);
            }
        }
        assert_eq!(side_by_side(&[], 4, |item: &u64| *item), [0; 0]);
    }
}
