// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package healthport

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/kit/listeners"
	"github.com/sluice-net/sluice/kit/log"
)

const (
	// firstConnect is how long Ports waits for the listeners of the previous process before it opens its own
	// listeners. Opening them fails while the listeners of the previous process are open.
	firstConnect = time.Second
	// reconnect is the pause before another attempt to connect to the store.
	reconnect = 200 * time.Millisecond
	// unclaimed is how long a listener of the previous process stays open while no known service has its port.
	unclaimed = time.Minute
)

// connected is a connection to the store of listeners; without a client, the result of a failed first attempt.
type connected struct {
	client *listeners.Client
	kept   []*net.TCPListener
}

// connect keeps connecting to the store until ctx ends, and passes each connection to Run. If the first attempt
// fails, it passes this result, too.
func (p *Ports) connect(ctx context.Context, to chan<- connected) {
	reported := ""
	for first := true; ctx.Err() == nil; first = false {
		attempt, cancel := context.WithTimeout(ctx, firstConnect)
		client, kept, err := listeners.Connect(attempt, p.store)
		cancel()
		switch {
		case err == nil:
			reported = ""
		case err.Error() != reported:
			reported = err.Error()
			p.log.Info("health check ports refuse connections during a restart, until the datapath keeps them", log.Err(err))
		}
		if err == nil || first {
			select {
			case to <- connected{client, kept}:
			case <-ctx.Done():
				p.disconnect(connected{client, kept})
				return
			}
		}
		if client != nil {
			select {
			case <-client.Ended():
			case <-ctx.Done():
				return
			}
		}
		select {
		case <-time.After(reconnect):
		case <-ctx.Done():
		}
	}
}

// disconnect closes a connection and this process's copies of its listeners. The store keeps them.
func (p *Ports) disconnect(c connected) {
	var errs []error
	for _, l := range c.kept {
		errs = append(errs, l.Close())
	}
	if c.client != nil {
		errs = append(errs, c.client.Close())
	}
	if err := errors.Join(errs...); err != nil {
		p.log.Debug("cannot close listeners of health check ports", log.Err(err))
	}
}

// adopt takes over the listeners that the store has kept, and gives the store the listeners of the open ports.
func (p *Ports) adopt(c connected) {
	if c.client == nil {
		return
	}
	if p.client != nil {
		p.disconnect(connected{client: p.client})
	}
	p.client, p.adopted = c.client, time.Now()
	for _, l := range c.kept {
		n := l.Addr().(*net.TCPAddr).AddrPort().Port() //nolint:forcetypeassert // of a TCP listener
		if open := p.open[n]; open != nil {
			p.closeCopy(l) // this process gave the listener to the store on an earlier connection
			continue
		}
		if was := p.kept[n]; was != nil {
			p.closeCopy(was)
		}
		p.kept[n] = l
	}
	for n, at := range p.open {
		p.keep(n, at.listener)
	}
}

// claim returns the listener of the previous process for a port; nil without one. It closes a listener whose
// address is not the configured one.
func (p *Ports) claim(n uint16) *net.TCPListener {
	l := p.kept[n]
	if l == nil {
		return nil
	}
	delete(p.kept, n)
	if !p.listensAt(l) {
		p.drop(n, l)
		return nil
	}
	return l
}

// listensAt reports whether a listener has the configured address.
func (p *Ports) listensAt(l *net.TCPListener) bool {
	have := l.Addr().(*net.TCPAddr).AddrPort().Addr() //nolint:forcetypeassert // of a TCP listener
	if p.address == "" {
		return have.IsUnspecified()
	}
	want, err := netip.ParseAddr(p.address)
	return err == nil && have.WithZone("").Unmap() == want.WithZone("").Unmap()
}

// keep gives a listener to the store. Without the store, connections are refused while this process restarts.
func (p *Ports) keep(n uint16, l *net.TCPListener) {
	if p.client == nil {
		return
	}
	if err := p.client.Keep(l); err != nil {
		p.log.Warn("connections to a health check port will be refused during a restart", "port", n, log.Err(err))
	}
}

// drop closes a listener in this process and in the store.
func (p *Ports) drop(n uint16, l *net.TCPListener) {
	if p.client != nil {
		if err := p.client.Drop(l); err != nil {
			p.log.Debug("cannot remove the listener of a health check port from the store", "port", n, log.Err(err))
		}
	}
	p.closeCopy(l)
}

func (p *Ports) closeCopy(l *net.TCPListener) {
	if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		p.log.Debug("cannot close the listener of a health check port", log.Err(err))
	}
}

// expire closes the previous process's listeners that no service has claimed in time. It waits, because services may
// be listed late.
func (p *Ports) expire() {
	if len(p.kept) == 0 || time.Since(p.adopted) < p.unclaimed {
		return
	}
	for n, l := range p.kept {
		delete(p.kept, n)
		p.drop(n, l)
	}
}
