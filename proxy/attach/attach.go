// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package attach attaches a proxy to the datapath. The proxy receives the queue of its TAP device from sluice-datapath,
// if it has one, and writes the heartbeat that the eBPF programs check. Over the same connection it gets the listeners
// for TCP connections, and sockets for connections to servers.
//
// The eBPF programs may still redirect packets after the connection has ended, for example while sluice-datapath
// restarts. So the queue and the heartbeat stay in use until the next connection replaces them.
package attach

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/seqpacket"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// Pauses between attempts to connect.
const (
	minPause = 50 * time.Millisecond
	maxPause = 500 * time.Millisecond
)

const (
	maxMessage = 64 << 10
	// maxDescriptors is the maximum number of descriptors that the kernel passes with one message.
	maxDescriptors = 253
)

// Queue is a queue of the TAP device that is being served.
type Queue interface {
	Ended() <-chan struct{} // closed when the queue can no longer be read
	Err() error             // why
}

// Options describe an Attachment. All fields are required, except where noted.
type Options struct {
	Proxy  netv1.Proxy // the kind of proxy
	Socket string      // socket of sluice-datapath, of type SOCK_SEQPACKET
	// Use serves a queue in place of the former one. It takes over the descriptor fd of the queue. nil: the proxy
	// has no queue.
	Use func(fd int) (Queue, error)
	// Listen accepts TCP connections from these listeners in place of the former ones. It takes over the
	// descriptors.
	Listen func(fds []int)
	Log    *slog.Logger
}

// Attachment keeps the process attached to the datapath while Run runs.
type Attachment struct {
	o    Options
	beat beat
	err  problem
	tcp  problem // why there are no TCP connections
	pool pool
}

// New returns an Attachment.
func New(o Options) *Attachment {
	a := &Attachment{o: o}
	a.err.set(errNever)
	a.tcp.set(errNever)
	a.pool.namespace = -1
	return a
}

var errNever = errors.New("not connected to sluice-datapath yet")

// Err returns the reason why the process is not attached; nil if it is attached.
func (a *Attachment) Err() error { return a.err.get() }

// TCPErr returns the reason why the process gets no TCP connections; nil if it gets them.
func (a *Attachment) TCPErr() error { return a.tcp.get() }

// Run attaches the process, and attaches it again after each failure, until ctx ends.
func (a *Attachment) Run(ctx context.Context) error {
	beating := make(chan struct{})
	go func() {
		defer close(beating)
		a.beat.run(ctx)
	}()
	defer func() {
		<-beating
		_ = a.beat.use(nil) // the kernel unmaps the memory at the end of the process
		a.pool.close()
	}()
	pause, reported := minPause, ""
	for ctx.Err() == nil {
		attached, err := a.attach(ctx)
		if ctx.Err() != nil {
			break
		}
		a.err.set(err)
		if attached {
			pause, reported = minPause, ""
		}
		if text := err.Error(); text != reported {
			reported = text
			a.o.Log.Warn("not attached to the datapath; connecting again", log.Err(err))
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
		pause = min(2*pause, maxPause)
	}
	a.err.set(errors.New("stopping"))
	return nil
}

// attach connects, and returns when the connection or the queue ends. attached is false if the process could not be
// attached.
func (a *Attachment) attach(ctx context.Context) (attached bool, err error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", a.o.Socket)
	if err != nil {
		return false, fmt.Errorf("connect to sluice-datapath: %w", err)
	}
	conn := c.(*net.UnixConn) //nolint:forcetypeassert // a unixpacket network has such connections
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	m, fds, err := a.receive(conn)
	if err != nil {
		return false, fmt.Errorf("attach by %s: %w", a.o.Socket, err)
	}
	queues, shared := fds[:len(fds)-1], fds[len(fds)-1]
	memory, err := mapBeat(shared, int(m.GetHeartbeatOffset()))
	unix.Close(shared) //nolint:errcheck // the memory stays mapped
	if err != nil {
		seqpacket.CloseAll(queues)
		return false, fmt.Errorf("attach by %s: %w", a.o.Socket, err)
	}
	var q Queue = endless{}
	if a.o.Use != nil {
		if q, err = a.o.Use(queues[0]); err != nil {
			return false, errors.Join(fmt.Errorf("attach by %s: %w", a.o.Socket, err), memory.unmap())
		}
	}
	if err := a.beat.use(memory); err != nil {
		a.o.Log.Warn("the memory of the former heartbeat stays mapped", log.Err(err))
	}
	a.err.set(nil)
	a.o.Log.Info("attached to the datapath", "device", m.GetTapDevice(), "mtu", m.GetTapMtu())
	ended := make(chan error, 1)
	go func() { ended <- a.serve(conn) }()
	select {
	case err = <-ended:
	case <-q.Ended():
		err = fmt.Errorf("read from the TAP device %s: %w", m.GetTapDevice(), q.Err())
		_ = conn.SetDeadline(time.Unix(1, 0))
		<-ended
	}
	return true, err
}

// endless takes the place of the queue of a proxy that has none.
type endless struct{}

func (endless) Ended() <-chan struct{} { return nil }
func (endless) Err() error             { return nil }

// receive reads the first message, and returns the message and its descriptors: the queue, if the proxy has one, and
// the memory for the heartbeat.
func (a *Attachment) receive(conn *net.UnixConn) (*datapathv1.ProxyAttachment, []int, error) {
	b, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(maxDescriptors*4))
	n, descriptors, flags, _, err := conn.ReadMsgUnix(b, oob)
	fds := seqpacket.Descriptors(oob[:descriptors])
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("sluice-datapath has refused the connection: %w", err)
	}
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("the message is too long")
	}
	m := &datapathv1.ProxyAttachment{}
	if err == nil {
		err = proto.Unmarshal(b[:n], m)
	}
	if err == nil {
		err = a.check(m, len(fds))
	}
	if err != nil {
		seqpacket.CloseAll(fds)
		return nil, nil, err
	}
	return m, fds, nil
}

// check checks the first message.
func (a *Attachment) check(m *datapathv1.ProxyAttachment, descriptors int) error {
	want := 1
	if a.o.Use != nil {
		want = 2
	}
	switch {
	case m.GetProxy() != a.o.Proxy:
		return fmt.Errorf("the attachment is for %s, not for %s", m.GetProxy(), a.o.Proxy)
	case descriptors != want:
		return fmt.Errorf("the attachment has %d descriptors, not %d", descriptors, want)
	case m.GetHeartbeatOffset()%8 != 0 || m.GetHeartbeatOffset() > maxMapped-8:
		return fmt.Errorf("the offset of the heartbeat, %d, is not a multiple of 8 up to %d", m.GetHeartbeatOffset(),
			maxMapped-8)
	}
	return nil
}
