// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// sluice-devetcd is one etcd member for development and tests, on a unix socket or a loopback port. It forms a
// cluster alone, or with several members on this machine that are listed in --members. A test or `sluice dev` starts
// it as a child process, so that no other binary links the etcd server.
//
// Do not use it in production: peers connect only over loopback, and the only authentication of clients is the
// permissions of the socket's directory, or client certificates with --cert.
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/api/v3/version"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// options is the validated command line.
type options struct {
	dataDir       string
	listen        *url.URL
	readyFD       int
	dieWithParent bool
	name          string   // name of this member in members
	peer          *url.URL // URL for the other members; nil if there are none
	members       string   // name=url,… of all members

	cert, key, clientCA string // files for TLS; "" for none
}

func run(args []string, stdout, stderr io.Writer) int {
	opts, err := parse(args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		fmt.Fprintln(stderr, "sluice-devetcd:", err)
		return 2
	}

	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	if opts.dieWithParent {
		ctx, err = untilParentEnds(ctx)
		if err != nil {
			fmt.Fprintln(stderr, "sluice-devetcd:", err)
			return 1
		}
	}

	ready := stdout
	if opts.readyFD >= 0 {
		f := os.NewFile(uintptr(opts.readyFD), "ready")
		defer f.Close()
		ready = f
	}
	if err := serve(ctx, opts, ready); err != nil {
		fmt.Fprintln(stderr, "sluice-devetcd:", err)
		return 1
	}
	return 0
}

func parse(args []string, stderr io.Writer) (options, error) {
	var opts options
	var listen, peer string
	fs := flag.NewFlagSet("sluice-devetcd", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&opts.dataDir, "data-dir", "", "directory of the member's data; created if absent, used by one process at a time")
	fs.StringVar(&listen, "listen", "",
		"address for clients: unix:///absolute/path, or http:// or https://127.0.0.1:PORT (0 picks a free one)")
	fs.IntVar(&opts.readyFD, "ready-fd", -1,
		"write the ready line to this inherited file descriptor, then close it; default: standard output")
	fs.BoolVar(&opts.dieWithParent, "die-with-parent", false, "stop when the process that started this one ends")
	fs.StringVar(&opts.name, "name", "sluice-dev", "name of the member")
	fs.StringVar(&peer, "peer", "",
		"this member's address for the other members, one of --members: http://127.0.0.1:PORT; empty for a single member")
	fs.StringVar(&opts.members, "members", "", "all members, including this one: name=http://127.0.0.1:PORT,…")
	fs.StringVar(&opts.cert, "cert", "", "server certificate file, for https")
	fs.StringVar(&opts.key, "key", "", "file with its key")
	fs.StringVar(&opts.clientCA, "client-ca", "",
		"CA certificate file; only clients with a certificate that it signed are accepted")
	if err := fs.Parse(args); err != nil {
		return options{}, err
	}

	var problems []error
	if fs.NArg() > 0 {
		problems = append(problems, fmt.Errorf("unexpected argument %q", fs.Arg(0)))
	}
	if opts.dataDir == "" {
		problems = append(problems, errors.New("--data-dir: is required"))
	}
	if opts.readyFD >= 0 && opts.readyFD < 3 {
		problems = append(problems, fmt.Errorf("--ready-fd: %d is a standard stream; leave the flag out to use standard output", opts.readyFD))
	}
	u, err := parseListen(listen)
	if err != nil {
		problems = append(problems, fmt.Errorf("--listen: %w", err))
	}
	opts.listen = u
	if https := u != nil && u.Scheme == "https"; https != (opts.cert != "" && opts.key != "" && opts.clientCA != "") {
		problems = append(problems, errors.New("--cert, --key and --client-ca: required for https, not allowed otherwise"))
	}
	if peer != "" || opts.members != "" {
		if opts.peer, err = parsePeer(peer, opts.name, opts.members); err != nil {
			problems = append(problems, err)
		}
	}
	return opts, errors.Join(problems...)
}

// parsePeer checks that peer is the member name in members, and that all members are on this machine.
func parsePeer(peer, name, members string) (*url.URL, error) {
	all, err := types.NewURLsMap(members)
	if err != nil {
		return nil, fmt.Errorf("--members: %w", err)
	}
	if urls := all[name]; len(urls) != 1 || urls[0].String() != peer {
		return nil, fmt.Errorf("--members: %q has not the member %s=%s of --name and --peer", members, name, peer)
	}
	for _, member := range all.URLs() {
		if u, err := parseListen(member); err != nil || u.Scheme != "http" || u.Port() == "0" {
			return nil, fmt.Errorf("--members: %q: wants http://127.0.0.1:PORT", member)
		}
	}
	return url.Parse(peer)
}

// parseListen accepts an absolute unix socket path that fits into sockaddr_un, or a plain HTTP address on loopback:
// only addresses that other machines cannot reach.
func parseListen(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	if err != nil {
		return nil, err
	}
	switch u.Scheme {
	case "unix":
		if u.Host != "" || !filepath.IsAbs(u.Path) {
			return nil, fmt.Errorf("%q: a socket is given as unix:///absolute/path", s)
		}
		// sun_path holds 108 bytes and a terminating zero.
		if len(u.Path) > 107 {
			return nil, fmt.Errorf("%q: the path has %d bytes, a socket address holds 107", s, len(u.Path))
		}
	case "http", "https":
		ip := net.ParseIP(u.Hostname())
		if ip == nil || !ip.IsLoopback() || u.Port() == "" {
			return nil, fmt.Errorf("%q: wants a loopback address and a port", s)
		}
	default:
		return nil, fmt.Errorf("%q: wants unix:///path, http://127.0.0.1:PORT or https://127.0.0.1:PORT", s)
	}
	return u, nil
}

// readyLine is printed once the member serves clients.
type readyLine struct {
	// Endpoint is a value for clientv3.Config.Endpoints.
	Endpoint string `json:"endpoint"`
	PID      int    `json:"pid"`
	Version  string `json:"version"`
}

// serve runs one member until ctx ends. It writes one JSON line to ready when
// clients are served.
func serve(ctx context.Context, opts options, ready io.Writer) error {
	if err := os.MkdirAll(opts.dataDir, 0o700); err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	// Connecting to a unix socket requires write permission, and etcd gives every client full access. So members of
	// the group that may enter the socket's directory may also connect; this is a dedicated group, not the services'
	// group. etcd creates the socket with the process's umask.
	unix.Umask(0o007)

	// etcd binds its socket, replacing a leftover one, before it locks its database, and then waits for that lock
	// forever. So take a lock first: a second process must neither take the first one's socket nor hang.
	unlock, err := lock(opts.dataDir)
	if err != nil {
		return err
	}
	defer unlock()

	// At every start, etcd warns about properties of a single development member (one port, simple tokens), and it
	// logs its own orderly stop as an error. Real start errors are returned. Between start and stop, log warnings.
	level := zap.NewAtomicLevelAt(zap.FatalLevel)
	cfg, err := config(opts, level)
	if err != nil {
		return err
	}
	etcd, err := embed.StartEtcd(cfg)
	if err != nil {
		return fmt.Errorf("start etcd in %s: %w", opts.dataDir, err)
	}
	defer etcd.Close()
	defer level.SetLevel(zap.FatalLevel)

	select {
	case <-etcd.Server.ReadyNotify():
	case err := <-etcd.Err():
		return fmt.Errorf("etcd stopped before it was ready: %w", err)
	case <-ctx.Done():
		return nil
	}
	level.SetLevel(zap.WarnLevel)
	line := readyLine{Endpoint: endpoint(opts.listen, etcd.Clients[0].Addr()), PID: os.Getpid(), Version: version.Version}
	if err := json.NewEncoder(ready).Encode(line); err != nil {
		return fmt.Errorf("write the ready line: %w", err)
	}
	if c, ok := ready.(io.Closer); ok && opts.readyFD >= 0 {
		if err := c.Close(); err != nil {
			return fmt.Errorf("close the ready descriptor: %w", err)
		}
	}

	select {
	case <-ctx.Done():
		return nil
	case err := <-etcd.Err():
		return fmt.Errorf("etcd stopped: %w", err)
	}
}

// endpoint returns the address for clients. A listen port of 0 is resolved only now.
func endpoint(listen *url.URL, addr net.Addr) string {
	if listen.Scheme == "unix" {
		return "unix://" + listen.Path
	}
	return listen.Scheme + "://" + addr.String()
}

func config(opts options, level zap.AtomicLevel) (*embed.Config, error) {
	logging := zap.NewProductionConfig()
	logging.Level = level
	logging.Encoding = "json"
	logging.DisableStacktrace = true
	logger, err := logging.Build()
	if err != nil {
		return nil, fmt.Errorf("set up logging: %w", err)
	}

	cfg := embed.NewConfig()
	cfg.Name = opts.name
	cfg.Dir = opts.dataDir
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(logger)
	cfg.ListenClientUrls = []url.URL{*opts.listen}
	if opts.cert != "" {
		cfg.ClientTLSInfo = transport.TLSInfo{
			CertFile: opts.cert, KeyFile: opts.key, TrustedCAFile: opts.clientCA, ClientCertAuth: true,
		}
	}
	// A single member does not listen for peers. The advertised URLs are only entries of the membership record, for
	// which etcd requires the form host:port; they are never dialled.
	nowhere := url.URL{Scheme: "http", Host: "127.0.0.1:1"}
	cfg.AdvertiseClientUrls = []url.URL{nowhere}
	cfg.ListenPeerUrls = nil
	cfg.AdvertisePeerUrls = []url.URL{nowhere}
	cfg.InitialCluster = cfg.Name + "=" + nowhere.String()
	// Only a new data directory uses the token. Each one becomes a separate cluster, so that clients cannot mistake
	// the revisions of one cluster for those in another.
	cfg.InitialClusterToken = rand.Text()
	if opts.peer != nil {
		cfg.ListenPeerUrls = []url.URL{*opts.peer}
		cfg.AdvertisePeerUrls = []url.URL{*opts.peer}
		cfg.InitialCluster = opts.members
		cfg.InitialClusterToken = opts.members // the same for all members
	}
	// The JSON gateway, which has no users here, would dial the member's own socket.
	cfg.EnableGRPCGateway = false
	// NewConfig leaves this at zero, which would log a warning for every request.
	cfg.WarningUnaryRequestDuration = 300 * time.Millisecond
	// A single member elects itself after at most two election timeouts, and a lease lives for at least one and a
	// half election timeouts. Short timeouts make starts and tests fast.
	cfg.TickMs, cfg.ElectionMs = 20, 200
	if opts.peer != nil {
		// Members on a busy machine must not lose leadership because of a late tick.
		cfg.TickMs, cfg.ElectionMs = 100, 1000
	}
	return cfg, nil
}

// lock locks the data directory for this process until the returned function is called or the process ends.
func lock(dir string) (unlock func(), err error) {
	path := filepath.Join(dir, "devetcd.lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock data directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("data directory %s is in use by another process (try: fuser %s)", dir, path)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return func() { f.Close() }, nil
}

// untilParentEnds returns a context that ends with ctx or with the parent process. It watches a pidfd instead of
// using PR_SET_PDEATHSIG: that signal is sent when the parent *thread* ends, and Go ends threads at any time.
func untilParentEnds(ctx context.Context) (context.Context, error) {
	ppid := os.Getppid()
	fd, err := unix.PidfdOpen(ppid, 0)
	if err != nil {
		return nil, fmt.Errorf("watch parent process %d: %w", ppid, err)
	}
	if os.Getppid() != ppid {
		unix.Close(fd)
		return nil, fmt.Errorf("parent process %d ended", ppid)
	}
	ctx, cancel := context.WithCancel(ctx)
	// The goroutine runs until the process ends. The process has one parent and calls this once.
	go func() {
		defer cancel()
		defer unix.Close(fd)
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}} // #nosec G115 -- a descriptor fits
		for {
			_, err := unix.Poll(poll, int(time.Hour/time.Millisecond))
			if err != nil && !errors.Is(err, unix.EINTR) {
				return
			}
			if poll[0].Revents != 0 {
				return
			}
		}
	}()
	return ctx, nil
}
