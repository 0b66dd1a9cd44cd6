// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kube is how services reach the Kubernetes API: an address that
// works, credentials, and objects of a kind as they change.
//
// The API may be away at any time and for any time. That ends no process, and
// deletes nothing: listed objects stay until the API deletes them. A server that was
// restored from an older backup, or belongs to another cluster, sends no event to a
// watch of the former state. Run compares revisions to notice it.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/sluice-net/sluice/kit/version"
)

// dialTimeout is how long a server may take to accept a connection before the
// next one is tried.
const dialTimeout = 5 * time.Second

// silence are the variables by which client-go reads, in seconds, how long a
// connection may bring nothing before the server is asked for a sign of life, and
// how long that may take. With its own values, 30 and 15, a server that disappears
// without closing its connections is noticed after 45 s.
var silence = map[string]string{"HTTP2_READ_IDLE_TIMEOUT_SECONDS": "10", "HTTP2_PING_TIMEOUT_SECONDS": "10"}

// protobuf is how the servers' own kinds are read; others have JSON only.
const protobuf = "application/vnd.kubernetes.protobuf"

// Options of a Client. All are needed.
type Options struct {
	Name string // of the service, for the servers' logs: "sluice-identity"
	// StateFile keeps the addresses of the servers, in a directory that only the
	// service writes to. Run keeps it up to date.
	StateFile string
	Log       *slog.Logger
}

// Client reaches the API.
type Client struct {
	// Config is for clients of the API. Copy it before changing it.
	Config *rest.Config
	// credentials says where they are from, and what to do if a server refuses them.
	credentials string
	addresses   *addresses
	monitor     *monitor
	log         *slog.Logger
}

// New returns a client. It connects to nothing, but reads the credentials.
func New(s Settings, o Options) (*Client, error) {
	// What the library has to say of itself is said by Follow.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	cfg, configured, err := s.load()
	if err != nil {
		return nil, err
	}
	for name, seconds := range silence {
		if _, set := os.LookupEnv(name); !set {
			if err := os.Setenv(name, seconds); err != nil {
				return nil, err
			}
		}
	}
	cfg.UserAgent = o.Name + "/" + version.Get().String()
	cfg.QPS, cfg.Burst = 20, 40
	cfg.Dial = (&net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}).DialContext
	c := &Client{
		Config: cfg, credentials: s.credentials(cfg), log: o.Log,
		addresses: newAddresses(configured, o.StateFile, o.Log),
	}
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return newFailover(next, c.addresses) })
	core, err := c.REST(schema.GroupVersion{Version: "v1"}, metav1.AddMetaToScheme)
	if err != nil {
		return nil, err
	}
	c.monitor = newMonitor(apiProber{core}, o.Log)
	return c, nil
}

// load reads the credentials, and the addresses that are configured.
func (s *Settings) load() (*rest.Config, []string, error) {
	if s.Kubeconfig != "" {
		rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: s.Kubeconfig}
		cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
		if err != nil {
			return nil, nil, fmt.Errorf("kubernetes.kubeconfig: %s: %w", s.Kubeconfig, err)
		}
		if cfg.ExecProvider != nil || cfg.AuthProvider != nil {
			return nil, nil, fmt.Errorf("kubernetes.kubeconfig: %s: users: exec and auth-provider are not supported: "+
				"this service executes nothing", s.Kubeconfig)
		}
		if err := checkAddress(cfg.Host); err != nil {
			return nil, nil, fmt.Errorf("kubernetes.kubeconfig: %s: clusters: server: %w", s.Kubeconfig, err)
		}
		return cfg, []string{cfg.Host}, nil
	}
	if !s.Enabled() {
		return nil, nil, errors.New("kubernetes.api: no address")
	}
	for key, file := range map[string]string{"token": s.Token, "ca": s.CA} {
		if _, err := os.ReadFile(file); err != nil {
			return nil, nil, fmt.Errorf("kubernetes.%s: %w", key, err)
		}
	}
	return &rest.Config{
		Host: s.API[0], BearerTokenFile: s.Token, TLSClientConfig: rest.TLSClientConfig{CAFile: s.CA},
	}, s.API, nil
}

// credentials says where the credentials are from. client-go reads files again, and what is in
// the kubeconfig itself only once.
func (s *Settings) credentials(cfg *rest.Config) string {
	switch {
	case s.Kubeconfig == "":
		return "kubernetes.token: " + s.Token + ": is read again within a minute after it was replaced"
	case cfg.BearerTokenFile != "":
		return "kubernetes.kubeconfig: " + cfg.BearerTokenFile + ": is read again within a minute after it was replaced"
	}
	return "kubernetes.kubeconfig: " + s.Kubeconfig + ": is read when this service starts; restart it if the file has " +
		"changed, or name files there (tokenFile, client-certificate)"
}

// refused adds to an error of the API where the credentials are from, if a server refuses them.
func (c *Client) refused(err error) error {
	if apierrors.IsUnauthorized(err) {
		return fmt.Errorf("%w: the credentials are refused (%s)", err, c.credentials)
	}
	return err
}

// Files are the directories that hold the credentials. New versions of them
// appear there, so that the files alone would not do.
func (c *Client) Files() (directories []string) {
	t := c.Config.TLSClientConfig
	for _, file := range []string{c.Config.BearerTokenFile, t.CAFile, t.CertFile, t.KeyFile} {
		if file != "" {
			directories = append(directories, filepath.Dir(file))
		}
	}
	return directories
}

// REST returns a client of one group and version of the API, for the types that
// add registers: far less than a client of everything.
func (c *Client) REST(gv schema.GroupVersion, add func(*runtime.Scheme) error) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	if err := add(scheme); err != nil {
		return nil, err
	}
	cfg := rest.CopyConfig(c.Config)
	cfg.GroupVersion, cfg.APIPath = &gv, "/apis"
	if gv.Group == "" {
		cfg.APIPath = "/api"
	}
	cfg.ContentType, cfg.AcceptContentTypes = protobuf, protobuf+",application/json"
	cfg.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	return rest.RESTClientFor(cfg)
}

// Servers returns the IP addresses of the API's servers, sorted: those that are
// configured, and those that the API named last, also before the last start. A
// configured name is left out. The channel is closed when they may have changed,
// which needs Run.
func (c *Client) Servers() (addresses []netip.Addr, changed <-chan struct{}) {
	return c.addresses.hosts()
}

// Nodes returns the number of Nodes. While it is not known, which needs Run, the number
// is one of a large cluster.
func (c *Client) Nodes() int {
	c.monitor.mu.Lock()
	defer c.monitor.mu.Unlock()
	return c.monitor.size()
}

// Cluster asks the API server for the UID of its cluster: that of the Namespace kube-system.
func (c *Client) Cluster(ctx context.Context) (string, error) {
	o, err := c.monitor.prober.origin(ctx)
	if err == nil && o.uid == "" {
		err = errors.New("the Kubernetes API has no Namespace kube-system")
	}
	return string(o.uid), err
}

// Run keeps the addresses of the servers, and makes every Follow of the client list
// again after a server was restored from an older backup, until ctx is done; it then
// returns nil.
func (c *Client) Run(ctx context.Context) error {
	slices, err := c.apiServers()
	if err != nil {
		return err
	}
	var checks sync.WaitGroup
	checks.Go(func() { c.monitor.run(ctx) })
	err = Follow(ctx, c, slices, &servers{addresses: c.addresses}, c.log)
	checks.Wait()
	return err
}
