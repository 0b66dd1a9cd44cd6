// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/durable"
)

// MaxPath is the maximum length of a socket path in bytes. The kernel allows 107; four are reserved
// for the suffix of the temporary name under which the socket is prepared.
const MaxPath = 107 - len(newSuffix)

const newSuffix = ".new"

// ErrInUse is returned by Listen if a running process serves the path.
var ErrInUse = errors.New("another process serves this socket")

// ListenOptions configure Listen. The zero value is usable.
type ListenOptions struct {
	Mode    fs.FileMode // mode of the socket; 0660 if 0
	DirMode fs.FileMode // mode of the directory if Listen creates it; 0750 if 0
	UID     *uint32     // owner of the socket; the process's own if nil
	GID     *uint32     // group of the socket, and of the directory if Listen creates it; the process's own if nil
	// Packets makes a socket of type SOCK_SEQPACKET, whose connections have messages instead of a stream.
	Packets bool
	// MaxConns is the maximum number of open connections, 1,024 if 0.
	MaxConns int
	// MaxConnsPerUID is the maximum number of open connections per uid other than 0, half of MaxConns if 0. Further
	// connections are closed at once. An eighth of MaxConns, and at least 4 unless MaxConns is very small, is
	// reserved for root. A single process of root is limited to MaxConnsPerUID, too, and half of root's reserve is
	// for other processes of root.
	MaxConnsPerUID int
	// Trusted users share the limits of root.
	Trusted []uint32
}

// Cred holds the kernel's peer credentials of a unix socket connection: of the process at the time
// when it connected.
type Cred struct {
	UID uint32
	GID uint32 // primary group only
	PID int32  // for logs only: the kernel may have reused it
}

// Listener is a unix socket that adds the peer's credentials to each connection.
type Listener struct {
	path  string
	inner *net.UnixListener
	lock  *os.File
	self  os.FileInfo // identifies the socket file, so that Close removes no other socket

	maxConns, maxPerUID int
	trusted             []uint32 // in addition to root

	mu      sync.Mutex
	conns   int            // guarded by mu
	perUID  map[uint32]int // guarded by mu
	perRoot map[int32]int  // guarded by mu; by PID of processes of uid 0 or of a trusted user
	refused uint64         // guarded by mu

	closeOnce sync.Once
	closeErr  error
}

// Listen creates a socket at path. It creates the directory of the path, but not the parents of
// that directory.
//
// A lock file next to the socket ("<path>.lock", which stays) distinguishes a running server from a
// dead one without a race. If the lock is free, the socket belongs to a process that was killed,
// and is replaced. If the lock is held for longer than 2 s, which allows for a process that is
// exiting, Listen returns ErrInUse. The socket appears under its name only when it has its owner
// and mode and accepts connections.
func Listen(path string, o ListenOptions) (_ *Listener, err error) {
	if len(path) > MaxPath {
		return nil, fmt.Errorf("socket path %q is %d bytes long; at most %d fit into a unix socket address", path,
			len(path), MaxPath)
	}
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("socket path %q is not absolute", path)
	}
	o.Mode = cmp.Or(o.Mode, 0o660)
	o.DirMode = cmp.Or(o.DirMode, 0o750)
	o.MaxConns = cmp.Or(o.MaxConns, 1024)
	o.MaxConnsPerUID = cmp.Or(o.MaxConnsPerUID, max(1, o.MaxConns/2))
	uid, gid := -1, -1
	if o.UID != nil {
		uid = int(*o.UID)
	}
	if o.GID != nil {
		gid = int(*o.GID)
	}
	if err := prepareDir(filepath.Dir(path), o.DirMode, uid, gid); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	lock, err := lockFile(path + ".lock")
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	for _, p := range []string{path, path + newSuffix} {
		if err := removeSocket(p); err != nil {
			return nil, fmt.Errorf("listen on %s: %w", path, err)
		}
	}

	// The socket file inherits the descriptor's mode at bind, so other users cannot connect at any time.
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var cerr error
		if err := c.Control(func(fd uintptr) { cerr = unix.Fchmod(int(fd), 0o600) }); err != nil {
			return err
		}
		return cerr
	}}
	network := "unix"
	if o.Packets {
		network = "unixpacket"
	}
	ln, err := lc.Listen(context.Background(), network, path+newSuffix)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	inner := ln.(*net.UnixListener)
	inner.SetUnlinkOnClose(false)
	defer func() {
		if err != nil {
			inner.Close()
			os.Remove(path + newSuffix)
		}
	}()
	if uid >= 0 || gid >= 0 {
		if err := os.Lchown(path+newSuffix, uid, gid); err != nil {
			return nil, fmt.Errorf("listen on %s: change the socket's owner to uid %d, gid %d: %w", path, uid, gid, err)
		}
	}
	if err := os.Chmod(path+newSuffix, o.Mode.Perm()); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	self, err := os.Lstat(path + newSuffix)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if err := os.Rename(path+newSuffix, path); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return &Listener{
		path: path, inner: inner, lock: lock, self: self,
		maxConns: o.MaxConns, maxPerUID: o.MaxConnsPerUID, trusted: o.Trusted,
		perUID: map[uint32]int{}, perRoot: map[int32]int{},
	}, nil
}

// prepareDir creates dir if it is missing. It refuses a directory in which other users could
// replace the socket.
func prepareDir(dir string, mode fs.FileMode, uid, gid int) error {
	err := os.Mkdir(dir, mode)
	switch {
	case err == nil:
		if err := os.Chmod(dir, mode); err != nil { // the umask may have removed bits
			return err
		}
		if uid >= 0 || gid >= 0 {
			if err := os.Chown(dir, uid, gid); err != nil {
				return fmt.Errorf("change the owner of %s to uid %d, gid %d: %w", dir, uid, gid, err)
			}
		}
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		// Services may not create the parent directories, and do not know their owners.
		return fmt.Errorf("%w: `sluice prepare` makes the directories of the services", err)
	case !errors.Is(err, fs.ErrExist):
		return err
	}
	fi, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if !fi.IsDir() {
		return fmt.Errorf("%s is not a directory", dir)
	}
	st := fi.Sys().(*syscall.Stat_t)
	if st.Uid != 0 && st.Uid != uint32(os.Geteuid()) && (uid < 0 || st.Uid != uint32(uid)) {
		return fmt.Errorf("directory %s belongs to uid %d, who could replace the socket: run the service as that user", dir,
			st.Uid)
	}
	if open := fi.Mode().Perm() & 0o022; open != 0 && fi.Mode()&fs.ModeSticky == 0 && (open&0o002 != 0 || st.Gid != 0) {
		return fmt.Errorf("directory %s has mode %#o: others could replace the socket; run: chmod go-w %s", dir, fi.Mode().Perm(), dir)
	}
	return nil
}

// exitWait is how long Listen waits for a lock that a killed process still holds: the kernel closes
// the files of a process some time after it appears dead.
const exitWait = 2 * time.Second

func lockFile(path string) (*os.File, error) {
	f, err := durable.Lock(path, exitWait)
	if errors.Is(err, durable.ErrLocked) {
		return nil, fmt.Errorf("%w (%s is locked)", ErrInUse, path)
	}
	return f, err
}

func removeSocket(path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket", path)
	}
	return os.Remove(path)
}

// Accept returns the next connection, with its peer's credentials.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.inner.AcceptUnix()
		if err != nil {
			return nil, err
		}
		cred, err := peerCred(c)
		if err != nil { // the peer has disconnected
			c.Close()
			continue
		}
		if !l.admit(cred) {
			c.Close()
			continue
		}
		return &conn{UnixConn: c, cred: cred, release: sync.OnceFunc(func() { l.release(cred) })}, nil
	}
}

// forRoot returns the number of connections that are reserved for root: an eighth, and at least as
// many as the CNI plugin and an operator need at the same time.
func (l *Listener) forRoot() int { return max(l.maxConns/8, min(4, l.maxConns/4)) }

func (l *Listener) isTrusted(uid uint32) bool { return uid == 0 || slices.Contains(l.trusted, uid) }

func (l *Listener) admit(c Cred) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	full := l.conns >= l.maxConns
	if l.isTrusted(c.UID) {
		// This limit is only for a process of root that leaks connections: it must not use the last ones. It is
		// not exact: the PID may have been reused, and is 0 for a process in another PID namespace.
		last, own := l.forRoot()/2, l.perRoot[c.PID]
		full = full || own >= l.maxPerUID || own >= last && l.conns >= l.maxConns-last
	} else {
		others := l.conns - l.perUID[0]
		for _, uid := range l.trusted {
			others -= l.perUID[uid]
		}
		full = full || l.perUID[c.UID] >= l.maxPerUID || others >= l.maxConns-l.forRoot()
	}
	if full {
		l.refused++
		return false
	}
	l.conns++
	l.perUID[c.UID]++
	if l.isTrusted(c.UID) {
		l.perRoot[c.PID]++
	}
	return true
}

func (l *Listener) release(c Cred) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns--
	if l.perUID[c.UID]--; l.perUID[c.UID] == 0 {
		delete(l.perUID, c.UID)
	}
	if !l.isTrusted(c.UID) {
		return
	}
	if l.perRoot[c.PID]--; l.perRoot[c.PID] == 0 {
		delete(l.perRoot, c.PID)
	}
}

// Conns returns the number of open connections, and the number of connections refused so far
// because of the limits.
func (l *Listener) Conns() (open int, refused uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conns, l.refused
}

// Close stops listening, removes the socket unless it was replaced, and releases the lock.
func (l *Listener) Close() error {
	l.closeOnce.Do(func() {
		if fi, err := os.Lstat(l.path); err == nil && os.SameFile(fi, l.self) {
			l.closeErr = os.Remove(l.path)
		}
		l.closeErr = errors.Join(l.closeErr, l.inner.Close(), l.lock.Close())
	})
	return l.closeErr
}

// Addr returns the address of the socket.
func (l *Listener) Addr() net.Addr { return &net.UnixAddr{Net: "unix", Name: l.path} }

type conn struct {
	*net.UnixConn
	cred    Cred
	release func()
}

func (c *conn) Cred() Cred { return c.cred }

func (c *conn) Close() error {
	defer c.release()
	return c.UnixConn.Close()
}

func peerCred(c syscall.Conn) (Cred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return Cred{}, err
	}
	var (
		u    *unix.Ucred
		uerr error
	)
	if err := raw.Control(func(fd uintptr) {
		u, uerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return Cred{}, err
	}
	if uerr != nil {
		return Cred{}, fmt.Errorf("read SO_PEERCRED: %w", uerr)
	}
	return Cred{UID: u.Uid, GID: u.Gid, PID: u.Pid}, nil
}
