//! The maps as plain bytes, one face for hash maps, tries and arrays.

use aya::maps::{
    Array, HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, PerCpuValues, lpm_trie,
};

use super::layout::{CHOICE_BYTES, REDIRECT_BYTES, ROUTE_BYTES, Reader, SEALED_ROUTE_BYTES};
use crate::dataplane::{PlaneError, Table};

/// A key and its value.
pub(super) type Pair = (Vec<u8>, Vec<u8>);

/// A table's map.
pub(super) trait Store: Send {
    /// Sets the value of a key.
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), PlaneError>;
    /// Removes a key that is there.
    fn remove(&mut self, key: &[u8]) -> Result<(), PlaneError>;
    /// Every key with its value.
    fn all(&self) -> Result<Vec<Pair>, PlaneError>;
}

pub(super) fn failed(error: &(impl std::error::Error + ?Sized)) -> PlaneError {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    PlaneError::Ebpf(text)
}

/// The first bytes of a slice; what is missing is 0.
pub(super) fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut padded = [0; N];
    for (to, from) in padded.iter_mut().zip(bytes) {
        *to = *from;
    }
    padded
}

impl<const K: usize, const V: usize> Store for HashMap<MapData, [u8; K], [u8; V]> {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), PlaneError> {
        self.insert(fixed::<K>(key), fixed::<V>(value), 0).map_err(|e| failed(&e))
    }

    fn remove(&mut self, key: &[u8]) -> Result<(), PlaneError> {
        Self::remove(self, &fixed(key)).map_err(|e| failed(&e))
    }

    fn all(&self) -> Result<Vec<Pair>, PlaneError> {
        let pair = |(k, v): ([u8; K], [u8; V])| (k.to_vec(), v.to_vec());
        self.iter().map(|item| item.map(pair).map_err(|e| failed(&e))).collect()
    }
}

const PREFIX_BYTES: usize = 14;

fn prefix(key: &[u8]) -> lpm_trie::Key<[u8; PREFIX_BYTES]> {
    let mut r = Reader(key);
    lpm_trie::Key::new(r.u32(), r.take())
}

impl Store for LpmTrie<MapData, [u8; PREFIX_BYTES], [u8; ROUTE_BYTES]> {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), PlaneError> {
        self.insert(&prefix(key), fixed::<ROUTE_BYTES>(value), 0).map_err(|e| failed(&e))
    }

    fn remove(&mut self, key: &[u8]) -> Result<(), PlaneError> {
        LpmTrie::remove(self, &prefix(key)).map_err(|e| failed(&e))
    }

    fn all(&self) -> Result<Vec<Pair>, PlaneError> {
        let pair = |key: Result<lpm_trie::Key<_>, MapError>| {
            let key = key.map_err(|e| failed(&e))?;
            // The longest match of a prefix that is there is that prefix itself.
            let value = self.get(&key, 0).map_err(|e| failed(&e))?;
            let mut bytes = key.prefix_len().to_ne_bytes().to_vec();
            bytes.extend(key.data());
            Ok((bytes, value.to_vec()))
        };
        self.keys().map(pair).collect()
    }
}

impl<const V: usize> Store for Array<MapData, [u8; V]> {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), PlaneError> {
        self.set(Reader(key).u32(), fixed::<V>(value), 0).map_err(|e| failed(&e))
    }

    fn remove(&mut self, key: &[u8]) -> Result<(), PlaneError> {
        self.set(Reader(key).u32(), [0; V], 0).map_err(|e| failed(&e))
    }

    /// The elements whose first number, the entry's own, is not 0.
    fn all(&self) -> Result<Vec<Pair>, PlaneError> {
        let mut elements = Vec::new();
        for (at, value) in (0u32..).zip(self.iter()) {
            let value = value.map_err(|e| failed(&e))?;
            if Reader(&value).u32() != 0 {
                elements.push((at.to_ne_bytes().to_vec(), value.to_vec()));
            }
        }
        Ok(elements)
    }
}

/// The map of a table, with the key and value sizes that it has.
pub(super) fn table_store(table: Table, map: Map) -> Result<Box<dyn Store>, PlaneError> {
    fn hash<const K: usize, const V: usize>(map: Map) -> Result<Box<dyn Store>, PlaneError> {
        let map: HashMap<MapData, [u8; K], [u8; V]> = map.try_into().map_err(|e| bad(&e))?;
        Ok(Box::new(map))
    }
    fn bad(error: &MapError) -> PlaneError {
        failed(error)
    }
    match table {
        Table::IngressGuard | Table::L2 => hash::<8, SEALED_ROUTE_BYTES>(map),
        Table::Redirect => hash::<16, REDIRECT_BYTES>(map),
        Table::Anycast => hash::<4, CHOICE_BYTES>(map),
        Table::Notify => hash::<12, 4>(map),
        Table::Multicast => hash::<4, SEALED_ROUTE_BYTES>(map),
        Table::Directory => {
            let trie: LpmTrie<MapData, [u8; PREFIX_BYTES], [u8; ROUTE_BYTES]> =
                map.try_into().map_err(|e| bad(&e))?;
            Ok(Box::new(trie))
        }
        Table::PortMac => {
            let array: Array<MapData, [u8; ROUTE_BYTES]> = map.try_into().map_err(|e| bad(&e))?;
            Ok(Box::new(array))
        }
    }
}

/// Per-CPU numbers, added up over the CPUs.
pub(super) fn sum<const N: usize, const V: usize>(
    map: &PerCpuArray<MapData, [u8; V]>,
    at: u32,
) -> Result<[u64; N], PlaneError> {
    let values = map.get(&at, 0).map_err(|e| failed(&e))?;
    let mut sums = [0u64; N];
    for value in values.iter() {
        let mut r = Reader(value);
        for sum in &mut sums {
            *sum = sum.wrapping_add(r.u64());
        }
    }
    Ok(sums)
}

/// Sets a per-CPU value: the first CPU's to `value`, the others' to 0.
pub(super) fn set_first<const V: usize>(
    map: &mut PerCpuArray<MapData, [u8; V]>,
    at: u32,
    value: [u8; V],
) -> Result<(), PlaneError> {
    let cpus = aya::util::nr_cpus().map_err(|(what, source)| PlaneError::Io {
        doing: format!("count the CPUs in {what}"),
        source,
    })?;
    let mut values = vec![[0; V]; cpus];
    if let Some(first) = values.first_mut() {
        *first = value;
    }
    let values = PerCpuValues::try_from(values)
        .map_err(|source| PlaneError::Io { doing: "set a counter".to_owned(), source })?;
    map.set(at, values, 0).map_err(|e| failed(&e))
}
