// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/test/internal/pod"
	"github.com/sluice-net/sluice/test/model"
)

// agent runs clients and servers in one network namespace.
type agent struct {
	pod.Pod
	name string // in the model
	wire *wire
	// gateway is the destination of frames of a pod. Frames of the outsider go to the node of the question.
	gateway net.HardwareAddr
}

// reply is the answer of a server.
type reply struct {
	Server string
	Source netip.Addr // as the server sees it
	ID     string
	// from is the source of the answer as the client sees it; unset for TCP.
	from netip.AddrPort
}

// heard records which servers have received a question.
type heard struct {
	mu  sync.Mutex
	all map[string][]reply // by ID
}

func (h *heard) add(r reply) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all[r.ID] = append(h.all[r.ID], r)
}

func (h *heard) of(id string) []reply {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.all[id]
}

// serveQuestions answers on the model's ports, on the given addresses or, without any, on all addresses.
func (a *agent) serveQuestions(t *testing.T, h *heard, at ...netip.Addr) {
	t.Helper()
	a.serveRaw(t, h)
	if len(at) == 0 {
		at = []netip.Addr{netip.IPv6Unspecified()}
	}
	for _, address := range at {
		for _, port := range model.Ports {
			serveAt(t, a.Pod, netip.AddrPortFrom(address, port), func(c *net.TCPConn) {
				id, err := bufio.NewReader(c).ReadString('\n')
				if err == nil {
					_, _ = c.Write(a.reply(h, id[:len(id)-1], c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()))
				}
			}, func(b []byte, from netip.AddrPort) []byte {
				id, _, _ := bytes.Cut(b, []byte{'\n'})
				return a.reply(h, string(id), from.Addr())
			})
		}
	}
}

// reply records a question from a client, and returns the answer.
func (a *agent) reply(h *heard, id string, from netip.Addr) []byte {
	r := reply{Server: a.name, Source: from.Unmap(), ID: id}
	h.add(r)
	b, _ := json.Marshal(r) // of strings and an address
	return b
}

// ask sends a question and waits for the answer until the timeout.
func (a *agent) ask(q *model.Question, timeout time.Duration) (reply, error) {
	deadline := time.Now().Add(timeout)
	var answer []byte
	var from netip.AddrPort
	var err error
	switch {
	case model.IsEcho(q.Proto):
		from, err = a.askForEcho(q, deadline)
		return reply{from: from}, err
	case q.Proto == corev1.ProtocolSCTP:
		answer, from, err = a.askByChunk(q, deadline)
	case q.Way.Frames:
		answer, from, err = a.askByFrames(q, deadline)
	case q.Proto == corev1.ProtocolTCP:
		answer, err = a.askByStream(q, deadline)
	default:
		answer, from, err = a.askByDatagram(q, deadline)
	}
	var r reply
	if err == nil {
		err = json.Unmarshal(answer, &r)
	}
	r.from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
	return r, err
}

// socket opens a socket that is bound to the source of a question, and connects it if connected is set.
func (a *agent) socket(q *model.Question, kind int, connected bool) (*os.File, error) {
	family, local := unix.AF_INET6, q.Source
	switch {
	case !local.Addr().IsValid():
		local = netip.AddrPortFrom(netip.IPv6Unspecified(), local.Port())
		if q.To.Addr().Is4() && !q.Way.Mapped {
			local = netip.AddrPortFrom(netip.IPv4Unspecified(), local.Port())
		}
	case q.Way.Mapped:
		local = netip.AddrPortFrom(netip.AddrFrom16(local.Addr().As16()), local.Port())
	}
	to := q.To
	if local.Addr().Is4() {
		family = unix.AF_INET
	} else {
		to = netip.AddrPortFrom(netip.AddrFrom16(to.Addr().As16()), to.Port())
	}
	fd := -1
	err := pod.In(a.Netns, func() (err error) {
		if fd, err = unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return err
		}
		if err := unix.Bind(fd, socketAddress(local)); err != nil || !connected {
			return err
		}
		if err := unix.Connect(fd, socketAddress(to)); !errors.Is(err, unix.EINPROGRESS) {
			return err
		}
		return nil
	})
	if err != nil {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		return nil, err
	}
	return os.NewFile(uintptr(fd), "question"), nil
}

func socketAddress(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

func (a *agent) askByStream(q *model.Question, deadline time.Time) ([]byte, error) {
	f, err := a.socket(q, unix.SOCK_STREAM, true)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.SetDeadline(deadline); err != nil {
		return nil, err
	}
	if _, err := f.WriteString(q.ID + "\n"); err != nil {
		return nil, err
	}
	return io.ReadAll(f)
}

// payloadOf returns the payload of a question, padded to its size.
func payloadOf(q *model.Question) []byte {
	b := append([]byte(q.ID), '\n')
	if more := q.Way.Size - len(b); more > 0 {
		b = append(b, make([]byte, more)...)
	}
	return b
}

func (a *agent) askByDatagram(q *model.Question, deadline time.Time) ([]byte, netip.AddrPort, error) {
	f, err := a.socket(q, unix.SOCK_DGRAM, q.Way.Connected)
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	defer f.Close()
	payload := payloadOf(q)
	b := make([]byte, 4096)
	if q.Way.Connected {
		if err := f.SetDeadline(deadline); err != nil {
			return nil, netip.AddrPort{}, err
		}
		if _, err := f.Write(payload); err != nil {
			return nil, netip.AddrPort{}, err
		}
		n, err := f.Read(b)
		return b[:max(n, 0)], q.To, err
	}
	return exchangeDatagram(f, deadline, b, func(c *net.UDPConn) error {
		_, err := c.WriteToUDPAddrPort(payload, q.To)
		return err
	})
}

// exchangeDatagram sends a question, and reads the answer and its source from the socket.
func exchangeDatagram(
	f *os.File, deadline time.Time, b []byte, send func(*net.UDPConn) error,
) ([]byte, netip.AddrPort, error) {
	c, err := net.FilePacketConn(f)
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	defer c.Close()
	if err := c.SetDeadline(deadline); err != nil {
		return nil, netip.AddrPort{}, err
	}
	u := c.(*net.UDPConn)
	if err := send(u); err != nil {
		return nil, netip.AddrPort{}, err
	}
	n, from, err := u.ReadFromUDPAddrPort(b)
	return b[:n], from, err
}

// framesOf returns the packets of a question, without Ethernet headers.
func framesOf(q *model.Question) [][]byte {
	from := q.Source
	if q.Way.Spoofed.IsValid() {
		from = netip.AddrPortFrom(q.Way.Spoofed, from.Port())
	}
	payload := append([]byte(q.ID), '\n')
	if q.Way.Fragments > 1 {
		payload = append(payload, bytes.Repeat([]byte{'.'}, 64)...)
	}
	u := udp(from, q.To, payload)
	if q.Way.NoChecksum {
		u[6], u[7] = 0, 0
	}
	if q.Way.Fragments <= 1 {
		return [][]byte{ip(from.Addr(), q.To.Addr(), unix.IPPROTO_UDP, part{}, u)}
	}
	var all [][]byte
	id := binary.BigEndian.Uint16(u) ^ q.To.Port() // concurrent questions differ in the source port
	const size = 24
	for i := range q.Way.Fragments {
		at, last := i*size, i == q.Way.Fragments-1
		end := at + size
		if last {
			end = len(u)
		}
		all = append(all, ip(from.Addr(), q.To.Addr(), unix.IPPROTO_UDP, part{id: id, offset: at, more: !last}, u[at:end]))
	}
	return all
}

func (a *agent) askByFrames(q *model.Question, deadline time.Time) ([]byte, netip.AddrPort, error) {
	send := func() error {
		for _, f := range framesOf(q) {
			if err := a.wire.send(a.gateway, f); err != nil {
				return err
			}
		}
		return nil
	}
	if q.Way.Spoofed.IsValid() {
		if err := send(); err != nil {
			return nil, netip.AddrPort{}, err
		}
		return nil, netip.AddrPort{}, errNoAnswer
	}
	f, err := a.socket(q, unix.SOCK_DGRAM, false)
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	defer f.Close()
	return exchangeDatagram(f, deadline, make([]byte, 4096), func(*net.UDPConn) error { return send() })
}

// errNoAnswer means that the client cannot receive an answer.
var errNoAnswer = errors.New("the client has forged the source address")

// addForModel creates a pod of the model on its node, and starts its servers.
func (r *modelRun) addForModel(p *model.Pod) {
	r.t.Helper()
	n := r.nodeOf(p.Node)
	live := newPod(r.t)
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	addresses, err := n.addContainer(ctx, live, p)
	if err != nil {
		r.t.Fatal(err)
	}
	live = live.WithAddresses(addresses)
	p.Addresses = model.Pair{live.IPv4, live.IPv6}
	a := &agent{Pod: live, name: p.Name, wire: newWire(r.t, live.Netns), gateway: hostEnd(r.t, n, live)}
	a.serveQuestions(r.t, &r.heard)
	r.agents[p.Name] = a
	r.known(p, r.namePorts(p))
}

// known waits until the kernels of all other nodes have the identity of a pod.
func (r *modelRun) known(p *model.Pod, identity uint32) {
	r.t.Helper()
	own, live := r.nodeOf(p.Node), r.agents[p.Name].Pod
	for _, n := range r.nodes {
		if n != own {
			n.kernelHas(r.t, entries(live, identity, own)...)
		}
	}
}

// agentOf returns the agent of the client. Frames of the outsider go to the node of the question.
func (r *modelRun) agentOf(q *model.Question) *agent {
	a := r.agents[q.From.String()]
	if q.From == (model.End{}) && q.Way.Frames && q.Node != nil {
		to := *a
		to.gateway = r.macs[q.Node.Name]
		return &to
	}
	return a
}

func describe(r reply, err error) string {
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%s answers from %s and sees %s", r.Server, r.from, r.Source)
}
