// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// sluice-devetcd is one etcd member for development and tests, on a unix socket
// or a loopback port: a cluster of its own, or one of several members on this
// machine that know each other by --members. A test or `sluice dev` starts it as
// a child. It keeps the etcd server out of every other binary's build list.
//
// It is not for production: peers on loopback only, and no authentication other
// than the permissions of the directory that holds the socket, or with --cert
// the certificates of clients.
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

// options is the command line after checking.
type options struct {
	dataDir       string
	listen        *url.URL
	readyFD       int
	dieWithParent bool
	name          string   // of the member in members
	peer          *url.URL // where the other members connect; nil: there are none
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
		"where clients connect: unix:///absolute/path, or http:// or https://127.0.0.1:PORT (0 picks a free one)")
	fs.IntVar(&opts.readyFD, "ready-fd", -1, "write the ready line to this inherited descriptor instead of standard output, then close it")
	fs.BoolVar(&opts.dieWithParent, "die-with-parent", false, "stop when the process that started this one ends")
	fs.StringVar(&opts.name, "name", "sluice-dev", "name of the member")
	fs.StringVar(&peer, "peer", "",
		"where the other members connect, one of --members: http://127.0.0.1:PORT; empty for a cluster of one member")
	fs.StringVar(&opts.members, "members", "", "all members of the cluster, this one too: name=http://127.0.0.1:PORT,…")
	fs.StringVar(&opts.cert, "cert", "", "file with the certificate that clients see; for https")
	fs.StringVar(&opts.key, "key", "", "file with its key")
	fs.StringVar(&opts.clientCA, "client-ca", "",
		"file with the certificates that those of clients are checked against: a client without one is refused")
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
		problems = append(problems, errors.New("--cert, --key and --client-ca: needed for https, and for it alone"))
	}
	if peer != "" || opts.members != "" {
		if opts.peer, err = parsePeer(peer, opts.name, opts.members); err != nil {
			problems = append(problems, err)
		}
	}
	return opts, errors.Join(problems...)
}

// parsePeer checks that a member is one of its cluster, and that all of them are
// on this machine.
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

// parseListen accepts an absolute unix socket path that fits sockaddr_un, or
// a plain HTTP address on loopback: nothing that another machine could reach.
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

// readyLine is what is printed once clients are served.
type readyLine struct {
	// Endpoint is what clientv3.Config.Endpoints takes.
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
	// Connecting takes the right to write: the group that may enter the socket's
	// directory may write, and to etcd all are equal. So it is a group of its own,
	// not the one that reads. etcd makes the socket with the process's umask.
	unix.Umask(0o007)

	// etcd binds its socket, replacing a leftover one, before it locks its
	// database, and waits for that lock without end. So ask first: a second
	// process must neither take the first one's socket nor hang.
	unlock, err := lock(opts.dataDir)
	if err != nil {
		return err
	}
	defer unlock()

	// etcd warns at every start of what a lone development member is (one port,
	// simple tokens) and calls its own orderly stop an error. Real trouble at
	// start is returned; between the two, warnings are worth reading.
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

// endpoint names the listener for clients: a port given as 0 is known only now.
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
	// The only member has nobody to talk to: it listens for no peer. The
	// advertised URLs are entries of the membership record, and etcd wants them
	// in host:port form; nothing here dials them.
	nowhere := url.URL{Scheme: "http", Host: "127.0.0.1:1"}
	cfg.AdvertiseClientUrls = []url.URL{nowhere}
	cfg.ListenPeerUrls = nil
	cfg.AdvertisePeerUrls = []url.URL{nowhere}
	cfg.InitialCluster = cfg.Name + "=" + nowhere.String()
	// Only a data directory that is new takes it: each is a cluster of its own,
	// whose revisions nobody takes for those of another.
	cfg.InitialClusterToken = rand.Text()
	if opts.peer != nil {
		cfg.ListenPeerUrls = []url.URL{*opts.peer}
		cfg.AdvertisePeerUrls = []url.URL{*opts.peer}
		cfg.InitialCluster = opts.members
		cfg.InitialClusterToken = opts.members // the same for all members
	}
	// The JSON gateway would dial back into our own socket for nobody.
	cfg.EnableGRPCGateway = false
	// Not set by NewConfig: zero would warn of every request.
	cfg.WarningUnaryRequestDuration = 300 * time.Millisecond
	// A lone member elects itself after at most two election timeouts, and a
	// lease lives at least one and a half: short ones make start and tests quick.
	cfg.TickMs, cfg.ElectionMs = 20, 200
	if opts.peer != nil {
		// Members of a busy machine must not depose each other for a late tick.
		cfg.TickMs, cfg.ElectionMs = 100, 1000
	}
	return cfg, nil
}

// lock takes the data directory for this process until the returned function
// is called or the process ends.
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

// untilParentEnds returns a context that ends with ctx or with the process
// that started this one. It watches a pidfd and does not use
// PR_SET_PDEATHSIG: that signal comes when the parent's *thread* ends, and in
// a Go parent threads come and go.
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
	// Lives as long as the process, which has one parent and one run.
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
