// Memory nodes in threads of this process: the real responder and arena, over any carrier.
#[allow(dead_code, unreachable_pub, reason = "each test and example uses a part of it")]
mod rack {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread::JoinHandle;
    use std::time::Duration;

    use bluebridge_memserver::arena::{Arena, ArenaConfig};
    use bluebridge_protocol::responder::{Config, Responder};
    use bluebridge_protocol::{Instant, store::PageStore};
    use bluebridge_transport::memory::{Hub, MemoryTransport};
    use bluebridge_transport::{Outgoing, Timestamp, Transport, Wait};
    use bluebridge_wire::address::{Fields, NODE_PREFIX_LEN, PAGE_BYTES};
    use bluebridge_wire::{Datagram, NodeId, Space, UDP_PORT};

    /// The tenant of every rack here.
    pub const SPACE: Space = Space(1);

    /// A memory node's thread; it ends when this is dropped.
    pub struct Server {
        stop: Arc<AtomicBool>,
        thread: Option<JoinHandle<()>>,
    }

    impl Server {
        /// Serves `bytes` of memory as `node` over a carrier.
        pub fn start<T: Transport + Send + 'static>(
            node: NodeId,
            bytes: usize,
            transport: T,
        ) -> Self {
            let stop = Arc::new(AtomicBool::new(false));
            let stopped = Arc::clone(&stop);
            let pages = u32::try_from(bytes / PAGE_BYTES).expect("a small rack");
            let thread = std::thread::spawn(move || serve(node, pages, transport, &stopped));
            Self { stop, thread: Some(thread) }
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            self.stop.store(true, Ordering::Relaxed);
            if let Some(thread) = self.thread.take() {
                let joined = thread.join();
                assert!(joined.is_ok() || std::thread::panicking(), "a memory node panicked");
            }
        }
    }

    fn serve<T: Transport>(node: NodeId, pages: u32, mut transport: T, stop: &AtomicBool) {
        let mut arena = Arena::on_heap(&ArenaConfig::default(), pages);
        let config = Config::new(SPACE, node, 1, 0x5eed + u64::from(node.0));
        let mut responder = Responder::new(&config).expect("a good configuration");
        while !stop.load(Ordering::Relaxed) {
            let until = transport.now() + Duration::from_millis(20);
            let wait = Wait::spinning(Duration::from_micros(20), until);
            let count = transport.receive(wait).expect("the carrier works");
            let now = Instant::from_nanos(transport.now().as_nanos());
            for index in 0..count {
                while !take(&mut responder, &mut arena, &transport, index, now) {
                    flush(&mut responder, &arena, &mut transport);
                }
            }
            flush(&mut responder, &arena, &mut transport);
            responder.handle_timeout(now, &mut arena).expect("nothing waits");
        }
    }

    fn take<T: Transport, S: PageStore>(
        responder: &mut Responder,
        store: &mut S,
        transport: &T,
        index: usize,
        now: Instant,
    ) -> bool {
        let incoming = transport.incoming(index);
        match Datagram::parse(incoming.source, incoming.destination, incoming.payload) {
            Ok(datagram) => {
                responder.handle_datagram(now, incoming.source_port, &datagram, store).is_ok()
            }
            Err(error) => {
                responder.count_malformed(error);
                true
            }
        }
    }

    fn flush<T: Transport, S: PageStore>(responder: &mut Responder, store: &S, transport: &mut T) {
        while responder.reply_count() > 0 {
            let outgoing: Vec<Outgoing<'_>> = responder
                .transmits(store)
                .map(|reply| Outgoing {
                    source: reply.source,
                    destination: reply.destination,
                    destination_port: reply.destination_port,
                    header: reply.head,
                    data: reply.data,
                })
                .collect();
            let sent = transport.transmit(&outgoing).expect("the carrier works");
            responder.release(sent);
        }
    }

    /// Memory nodes on a hub of this process; node 0 leads to the first of them.
    pub struct Rack {
        hub: Hub,
        _servers: Vec<Server>,
    }

    impl Rack {
        /// Starts the nodes, each with `bytes` of memory.
        pub fn start(nodes: &[NodeId], bytes: usize) -> Self {
            let hub = Hub::new(4096);
            let mut servers = Vec::new();
            for (at, node) in nodes.iter().enumerate() {
                let transport = attach(&hub, *node, UDP_PORT);
                if at == 0 {
                    hub.route(prefix(NodeId::ANY), &[transport.id()]).expect("it is attached");
                }
                servers.push(Server::start(*node, bytes, transport));
            }
            Self { hub, _servers: servers }
        }

        /// A carrier for a client.
        pub fn attach(&self, node: NodeId) -> MemoryTransport {
            attach(&self.hub, node, 40_000 + node.0 % 1000)
        }
    }

    fn attach(hub: &Hub, node: NodeId, port: u16) -> MemoryTransport {
        hub.attach(port, &[prefix(node)]).expect("the node is new")
    }

    /// The addresses of a node.
    pub fn prefix(node: NodeId) -> ipnet::Ipv6Net {
        let first = Fields { space: SPACE, node, command: 0, tag: 0, location: 0 };
        ipnet::Ipv6Net::new(first.to_ipv6(), NODE_PREFIX_LEN).expect("a prefix")
    }

    /// The time on a carrier's clock, for measurements.
    pub fn nanos(timestamp: Timestamp) -> u64 {
        timestamp.as_nanos()
    }
}
