//! The tables' maps with one trait for hash maps, tries and arrays.

use aya::{
    Pod,
    maps::{Array, HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, PerCpuValues, lpm_trie},
};
use zerocopy::{FromBytes, FromZeros as _, Immutable, IntoBytes};

use super::structs::{
    Choice, DirectoryBits, DirectoryKey, GuardKey, MacKey, NotifyKey, Redirect, RedirectKey, Route,
    SealedRoute, from_bytes,
};
use crate::dataplane::{PlaneError, Table};

/// A key and its value.
pub(super) type Pair = (Vec<u8>, Vec<u8>);

/// A table's map.
pub(super) trait Store: Send {
    /// Sets the value of a key.
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), PlaneError>;
    /// Removes an existing key.
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

impl<K, V> Store for HashMap<MapData, K, V>
where
    K: Pod + FromBytes + Immutable + IntoBytes + Send,
    V: Pod + FromBytes + Immutable + IntoBytes + Send,
{
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), PlaneError> {
        self.insert(from_bytes::<K>(key), from_bytes::<V>(value), 0).map_err(|e| failed(&e))
    }

    fn remove(&mut self, key: &[u8]) -> Result<(), PlaneError> {
        Self::remove(self, &from_bytes(key)).map_err(|e| failed(&e))
    }

    fn all(&self) -> Result<Vec<Pair>, PlaneError> {
        let pair = |(key, value): (K, V)| (key.as_bytes().to_vec(), value.as_bytes().to_vec());
        self.iter().map(|item| item.map(pair).map_err(|e| failed(&e))).collect()
    }
}

fn prefix(key: &[u8]) -> lpm_trie::Key<DirectoryBits> {
    let DirectoryKey { prefix_len, bits } = from_bytes(key);
    lpm_trie::Key::new(prefix_len, bits)
}

impl Store for LpmTrie<MapData, DirectoryBits, Route> {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), PlaneError> {
        self.insert(&prefix(key), from_bytes::<Route>(value), 0).map_err(|e| failed(&e))
    }

    fn remove(&mut self, key: &[u8]) -> Result<(), PlaneError> {
        Self::remove(self, &prefix(key)).map_err(|e| failed(&e))
    }

    fn all(&self) -> Result<Vec<Pair>, PlaneError> {
        let pair = |key: Result<lpm_trie::Key<DirectoryBits>, MapError>| {
            let key = key.map_err(|e| failed(&e))?;
            // The longest match of an existing prefix is that prefix itself.
            let value = self.get(&key, 0).map_err(|e| failed(&e))?;
            let key = DirectoryKey { prefix_len: key.prefix_len(), bits: key.data() };
            Ok((key.as_bytes().to_vec(), value.as_bytes().to_vec()))
        };
        self.keys().map(pair).collect()
    }
}

impl Store for Array<MapData, Route> {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), PlaneError> {
        self.set(from_bytes(key), from_bytes::<Route>(value), 0).map_err(|e| failed(&e))
    }

    fn remove(&mut self, key: &[u8]) -> Result<(), PlaneError> {
        self.set(from_bytes(key), Route::new_zeroed(), 0).map_err(|e| failed(&e))
    }

    /// The elements whose entry has a number.
    fn all(&self) -> Result<Vec<Pair>, PlaneError> {
        let mut elements = Vec::new();
        for (at, route) in (0u32..).zip(self.iter()) {
            let route = route.map_err(|e| failed(&e))?;
            if route.index != 0 {
                elements.push((at.as_bytes().to_vec(), route.as_bytes().to_vec()));
            }
        }
        Ok(elements)
    }
}

/// The map of a table, with its key and value sizes.
pub(super) fn table_store(table: Table, map: Map) -> Result<Box<dyn Store>, PlaneError> {
    fn typed<M: Store + TryFrom<Map, Error = MapError> + 'static>(
        map: Map,
    ) -> Result<Box<dyn Store>, PlaneError> {
        Ok(Box::new(M::try_from(map).map_err(|e| failed(&e))?))
    }
    /// A scope, big endian.
    type Scope = [u8; 4];
    match table {
        Table::IngressGuard => typed::<HashMap<MapData, GuardKey, SealedRoute>>(map),
        Table::Redirect => typed::<HashMap<MapData, RedirectKey, Redirect>>(map),
        Table::Directory => typed::<LpmTrie<MapData, DirectoryBits, Route>>(map),
        Table::Anycast => typed::<HashMap<MapData, Scope, Choice>>(map),
        Table::Notify => typed::<HashMap<MapData, NotifyKey, u32>>(map),
        Table::L2 => typed::<HashMap<MapData, MacKey, SealedRoute>>(map),
        Table::PortMac => typed::<Array<MapData, Route>>(map),
        Table::Multicast => typed::<HashMap<MapData, Scope, SealedRoute>>(map),
    }
}

/// A per-CPU value, added up over the CPUs.
pub(super) fn sum<V: Pod + Default>(
    map: &PerCpuArray<MapData, V>,
    at: u32,
    plus: impl Fn(V, V) -> V,
) -> Result<V, PlaneError> {
    let values = map.get(&at, 0).map_err(|e| failed(&e))?;
    Ok(values.iter().copied().fold(V::default(), plus))
}

/// Sets a per-CPU value: the first CPU's to `value`, the others' to nothing.
pub(super) fn set_first<V: Pod + Default>(
    map: &mut PerCpuArray<MapData, V>,
    at: u32,
    value: V,
) -> Result<(), PlaneError> {
    let cpus = aya::util::nr_cpus().map_err(|(what, source)| PlaneError::Io {
        doing: format!("count the CPUs in {what}"),
        source,
    })?;
    let mut values = vec![V::default(); cpus];
    if let Some(first) = values.first_mut() {
        *first = value;
    }
    let values = PerCpuValues::try_from(values)
        .map_err(|source| PlaneError::Io { doing: "set a counter".to_owned(), source })?;
    map.set(at, values, 0).map_err(|e| failed(&e))
}
