// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bugreport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/kit/instance"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

// metrics writes the metrics of a process. A compromised process must not make root connect to an address of its
// choice. Therefore metrics uses the address that the process reports only if it is a socket in the process's
// directory, or if it is in a configuration file that only root can write.
func (r *report) metrics(ctx context.Context, w *content, name string) error {
	dir := filepath.Join(r.runDir, name)
	address := filepath.Join(dir, "metrics.sock")
	process, _ := invocation.ProcessOf(name)
	settings, err := invocation.Ask(ctx, r.inv, process, statusv1.ProcessServiceClient.GetConfig,
		&statusv1.GetConfigRequest{})
	for _, s := range settings.GetSettings() {
		if s.GetKey() == "metrics.address" {
			address = s.GetValue()
		}
	}
	file, ferr := r.configFile(name)
	if ferr != nil {
		return ferr
	}
	var dial func(context.Context) (net.Conn, error)
	switch configured := configuredAddress(file); {
	case address == "off":
		return errors.New("the setting metrics.address is off")
	case filepath.IsAbs(address) && filepath.Dir(filepath.Clean(address)) == dir:
		dial = func(ctx context.Context) (net.Conn, error) { return dialOwn(ctx, dir, filepath.Base(address)) }
	case address != configured:
		return fmt.Errorf("the process reports its metrics at %s, which is neither in %s nor in %s; that address "+
			"is not connected to", address, dir, file)
	case filepath.IsAbs(address):
		dial = func(ctx context.Context) (net.Conn, error) { return dialSocket(ctx, address) }
	default:
		if space, err := r.namespace(ctx); err != nil || space.file != nil {
			return fmt.Errorf("%s is an address of another network namespace", address)
		}
		dial = func(ctx context.Context) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", address)
		}
	}
	client := http.Client{
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		},
		// Do not follow redirects, for the same reason.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	request, rerr := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost/metrics", http.NoBody)
	if rerr != nil {
		return rerr
	}
	answer, gerr := client.Do(request)
	if gerr != nil {
		return joined([]error{gerr, err})
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", address, answer.Status)
	}
	_, err = io.Copy(w, answer.Body)
	return err
}

// configFile returns the path of a process's configuration without asking the process.
func (r *report) configFile(name string) (string, error) {
	paths, err := instance.New(r.inv.Instance)
	if err != nil {
		return "", err
	}
	if r.configDir != "" {
		paths.ConfigDir = r.configDir
	}
	return paths.ConfigFile(name), nil
}

// configuredAddress returns metrics.address of a configuration file; empty if the file does not set it, or if users
// other than root can write the file.
func configuredAddress(file string) string {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Mode().Perm()&0o022 != 0 {
		return ""
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || st.Uid != 0 {
		return ""
	}
	var settings struct {
		Metrics struct {
			Address string `yaml:"address"`
		} `yaml:"metrics"`
	}
	text, err := io.ReadAll(io.LimitReader(f, 1<<20))
	if err != nil || yaml.Unmarshal(text, &settings) != nil {
		return ""
	}
	return settings.Metrics.Address
}

// dialOwn connects to a socket in the directory of a process, if the socket belongs to the owner of the directory. It
// does not follow links, because the process could replace its socket by a link to another program's socket.
func dialOwn(ctx context.Context, dir, name string) (*net.UnixConn, error) {
	d, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", dir, err)
	}
	defer unix.Close(d)
	s, err := unix.Openat(d, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", filepath.Join(dir, name), err)
	}
	defer unix.Close(s)
	var of, is unix.Stat_t
	if err := errors.Join(unix.Fstat(d, &of), unix.Fstat(s, &is)); err != nil {
		return nil, err
	}
	if is.Mode&unix.S_IFMT != unix.S_IFSOCK || is.Uid != of.Uid {
		return nil, fmt.Errorf("%s is not a socket of the owner of %s", filepath.Join(dir, name), dir)
	}
	return dialSocket(ctx, fmt.Sprintf("/proc/self/fd/%d", s))
}
