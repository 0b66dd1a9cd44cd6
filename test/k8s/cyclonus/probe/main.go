// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command probe tries connections from inside a pod, all connections of a request at once. It reads requests as JSON
// from its standard input, answers each on its standard output, and ends when its input ends.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// patience is the timeout of a target, including name resolution. A target that has neither answered nor refused by
// then is blocked.
const patience = time.Second

// batch contains the used fields of cyclonus's worker.Batch.
type batch struct {
	Requests []target
}

// target is cyclonus's worker.Request.
type target struct {
	Key, Protocol, Host string
	Port                int
}

// result is cyclonus's worker.Result. An empty error means that the target answered.
type result struct {
	Request target
	Error   string
}

func main() {
	if err := serve(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func serve(r io.Reader, w io.Writer) error {
	requests, answers := json.NewDecoder(r), json.NewEncoder(w)
	for {
		var b batch
		if err := requests.Decode(&b); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := answers.Encode(probe(b.Requests)); err != nil {
			return err
		}
	}
}

func probe(targets []target) []result {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	addresses := resolve(ctx, targets)
	results := make([]result, len(targets))
	var wait sync.WaitGroup
	for i, t := range targets {
		results[i].Request = t
		wait.Go(func() {
			if err := try(ctx, t, addresses[t.Host]); err != nil {
				results[i].Error = err.Error()
			}
		})
	}
	wait.Wait()
	return results
}

// resolve looks up the IPv4 address of each host once. A host without an answer is absent from the result.
func resolve(ctx context.Context, targets []target) map[string]netip.Addr {
	addresses := map[string]netip.Addr{}
	var mu sync.Mutex
	var wait sync.WaitGroup
	asked := map[string]bool{}
	for _, t := range targets {
		if asked[t.Host] {
			continue
		}
		asked[t.Host] = true
		wait.Go(func() {
			host := t.Host
			if _, err := netip.ParseAddr(host); err != nil {
				host = strings.TrimSuffix(host, ".") + "." // fully qualified: no search list
			}
			found, err := net.DefaultResolver.LookupNetIP(ctx, "ip4", host)
			if err != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			addresses[t.Host] = found[0].Unmap()
		})
	}
	wait.Wait()
	return addresses
}

// try acts as `agnhost connect`: it opens a TCP connection, or sends a datagram and waits for an answer.
func try(ctx context.Context, t target, address netip.Addr) error {
	if !address.IsValid() {
		return fmt.Errorf("no address of %s", t.Host)
	}
	network := strings.ToLower(t.Protocol)
	if network != "tcp" && network != "udp" {
		return fmt.Errorf("protocol %q is not known", t.Protocol)
	}
	conn, err := new(net.Dialer).DialContext(ctx, network, net.JoinHostPort(address.String(), strconv.Itoa(t.Port)))
	if err != nil {
		return err
	}
	defer conn.Close()
	if network == "tcp" {
		return nil
	}
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("hostname\n")); err != nil {
		return err
	}
	_, err = conn.Read(make([]byte, 1024))
	return err
}
